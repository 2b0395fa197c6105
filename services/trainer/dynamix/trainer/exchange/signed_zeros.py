"""Zeros that do not travel, of both signs.

The sum of zeros is -0.0 only where all ranks have it. Gradients that were multiplied by a mask are full of -0.0, so a
codec that leaves out zeros by value must agree on their signs, in one bit per element, and seldom does: where one rank
has none outside of what travels, there is none in the sum.
"""

from torch import Tensor

from .collectives import Leg, Union
from .sparse.bitmap import pack_bits, positions, unpack_bits


def settle_zeros(flat: Tensor, minus: Tensor | None, *, one_has_none: bool) -> Leg:
    """Give the zeros of a bucket the signs of their sums; nothing else in it may be -0.0.

    Args:
        flat: the bucket; what travels in another way is overwritten later, or has its sums already.
        minus: where this rank's own gradient is -0.0; `None` for nowhere, only where `one_has_none`.
        one_has_none: whether a rank has -0.0 nowhere, which all ranks know.
    """
    if one_has_none:
        if minus is not None:
            flat.add_(0.0)
        return
    assert minus is not None, "every rank has -0.0"
    others = pack_bits(minus.logical_not())
    yield Union(others)
    flat.add_(0.0).index_fill_(0, positions(unpack_bits(others, len(flat)).logical_not_()), -0.0)
