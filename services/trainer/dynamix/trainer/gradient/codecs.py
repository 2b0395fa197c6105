"""Gradient codecs: how a bucket is encoded before the all-reduce and decoded after it.

A codec must be summable: the sum of the encoded buckets of all ranks decodes to the sum of the buckets, as far as its
precision goes. `attach(codec="name")` finds one by the name that its package registers as an entry point of the group
`dynamix.codecs`. Every rank uses the same one for the whole run.
"""

from typing import Protocol, runtime_checkable

import torch

from dynamix.runtime.extensions import extension_names, load_extension
from dynamix.schemas.messages.allocation import EXACT
from dynamix.schemas.spelling import suggestion


@runtime_checkable
class GradientCodec(Protocol):
    """Encodes and decodes the buckets of one model; an instance may keep residuals, by bucket index."""

    def encode(self, bucket: torch.Tensor, index: int) -> torch.Tensor:
        """A new tensor that all ranks sum; `bucket` is flat, weighted, and must not be changed."""

    def decode(self, summed: torch.Tensor, bucket: torch.Tensor, index: int) -> None:
        """Write what the summed tensor stands for into `bucket`."""


def find_codec(name: str) -> GradientCodec | None:
    """A codec by its registered name; `None` for `none`, which sends gradients as they are.

    Raises:
        ValueError: when no installed package registers the name, or what is registered does not fit the protocol.
    """
    if name == EXACT.codec:
        return None
    found = load_extension("dynamix.codecs", name, _checked)
    if found is None:
        known = suggestion(name, [EXACT.codec, *extension_names("dynamix.codecs")])
        raise ValueError(f"no installed package registers a gradient codec {name!r} (group dynamix.codecs){known}")
    return found


def _checked(found: object) -> GradientCodec:
    if not isinstance(found, GradientCodec):
        raise TypeError(
            f"{type(found).__name__} is no gradient codec: it needs encode(bucket, index) and "
            "decode(summed, bucket, index)"
        )
    return found
