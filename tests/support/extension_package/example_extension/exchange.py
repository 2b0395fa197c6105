"""Codecs that decisions can choose: `reversed` loses nothing, `coarse` rounds and adds the error to the next step's."""

import torch

from dynamix.trainer.exchange.collectives import Sum


class ReversedExchange:
    """Sends buckets from their end to their beginning."""

    name = "reversed"
    is_lossless = True

    def reduce(self, bucket, member):  # noqa: ARG002 - the protocol's arguments
        backwards = bucket.flat.flip(0)
        yield Sum(backwards)
        bucket.flat.copy_(backwards.flip(0))


class CoarseExchange:
    """Rounds to bfloat16 what every rank sends."""

    name = "coarse"
    is_lossless = False

    def __init__(self):
        self._residuals = {}

    def residuals(self):
        return dict(self._residuals)

    def load_residuals(self, residuals):
        self._residuals = {key: each.clone() for key, each in residuals.items()}

    def reduce(self, bucket, member):  # noqa: ARG002
        wanted = bucket.flat + self._residual(bucket)
        sent = wanted.to(torch.bfloat16).to(wanted.dtype)
        yield Sum(bucket.flat.copy_(sent))
        self._keep(bucket, wanted.sub_(wanted.to(torch.bfloat16)))

    def flush(self, bucket, member):  # noqa: ARG002
        bucket.flat.add_(self._residual(bucket))
        yield Sum(bucket.flat)
        self._keep(bucket, torch.zeros_like(bucket.flat))

    def _residual(self, bucket):
        sizes = {part.key: part.stop - part.start for part in bucket.parts}
        return torch.cat([self._residuals.get(key, torch.zeros(size)) for key, size in sizes.items()])

    def _keep(self, bucket, residual):
        for part in bucket.parts:
            self._residuals[part.key] = residual[part.start : part.stop].clone()
