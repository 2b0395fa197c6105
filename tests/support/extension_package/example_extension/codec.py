"""`example`: sends gradients as bfloat16, with what was cut off added to the next step's."""

import torch


class ExampleCodec:
    def __init__(self):
        self._residuals = {}

    def encode(self, bucket, index):
        residual = self._residuals.get(index)
        wanted = bucket if residual is None or residual.shape != bucket.shape else bucket + residual
        encoded = wanted.to(torch.bfloat16)
        self._residuals[index] = wanted - encoded.to(bucket.dtype)
        return encoded

    def decode(self, summed, bucket, index):  # noqa: ARG002 - the protocol's arguments
        bucket.copy_(summed)
