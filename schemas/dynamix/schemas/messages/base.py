"""What all messages share, and the field types that several of them have."""

from typing import Literal

import msgspec

OptimizerFamily = Literal["sgd", "adam"]
"""`adam` stands for every optimizer that divides by a running gradient norm (method section IV-D)."""


class Message(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """Base of all messages: immutable, encoded as arrays in field order.

    `gc=False` spares the garbage collector: an immutable object cannot become part of a reference cycle.
    """
