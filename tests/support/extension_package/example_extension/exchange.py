"""Codecs of an extension: `reversed` loses nothing, `coarse` rounds and adds the error to the next step's gradient."""

import torch

from dynamix.trainer.exchange.codec import ErrorFeedback, Sum


class ReversedExchange:
    """Sends buckets from their end to their beginning."""

    name = "reversed"
    is_lossless = True

    def reduce(self, bucket, member):  # noqa: ARG002 - the protocol's arguments
        backwards = bucket.flat.flip(0)
        yield Sum(backwards)
        bucket.flat.copy_(backwards.flip(0))


class CoarseExchange(ErrorFeedback):
    """Rounds to bfloat16 what every rank sends."""

    name = "coarse"

    def reduce(self, bucket, member):  # noqa: ARG002
        wanted = bucket.flat + self.residuals.of(bucket)
        sent = wanted.to(torch.bfloat16).to(wanted.dtype)
        yield Sum(bucket.flat.copy_(sent))
        self.residuals.put(bucket, wanted - sent)
