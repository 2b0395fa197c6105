"""Exchange codecs by name: ours, and those that packages register in the group `dynamix.exchange_codecs`.

A name of a package is an entry point to a class without arguments, like those here; names of ours are looked up first.
"""

from collections.abc import Callable

import torch

from dynamix.runtime.extensions import Group, extension_names, load_extension
from dynamix.schemas.spelling import suggestion

from .casts import Cast
from .codec import ErrorFeedbackCodec, ExchangeCodec
from .int8 import Int8
from .lossy import LossyExchange
from .low_rank import LowRankExchange
from .owners import PlainExchange
from .rows import RowsExchange
from .sketch import SketchExchange

GROUP: Group = "dynamix.exchange_codecs"
"""Group of entry points."""

CODECS: dict[str, Callable[[], ExchangeCodec]] = {
    "none": PlainExchange,
    "bf16": lambda: LossyExchange("bf16", Cast(torch.bfloat16)),
    "fp16": lambda: LossyExchange("fp16", Cast(torch.float16)),
    "rows": RowsExchange,
    "sketch": SketchExchange,
    "int8": lambda: LossyExchange("int8", Int8()),
    "powersgd": LowRankExchange,
}
"""Ours, each made once per model."""


def exchange_codec(name: str) -> ExchangeCodec:
    """A new codec for one model.

    Raises:
        ValueError: when neither we nor an installed package have the name, or what a package registers does not fit.
    """
    if name in CODECS:
        return CODECS[name]()
    found = load_extension(GROUP, name, _checked)
    if found is None:
        known = suggestion(name, [*CODECS, *extension_names(GROUP)])
        raise ValueError(
            f"exchange codec {name!r} is unknown: it is none of {', '.join(CODECS)}, and no installed package "
            f"registers it (group {GROUP}){known}"
        )
    return found


def _checked(found: object) -> ExchangeCodec:
    if not isinstance(found, ExchangeCodec):
        raise TypeError(f"{type(found).__name__} is no exchange codec: it needs name, is_lossless and reduce(...)")
    if not found.is_lossless and not isinstance(found, ErrorFeedbackCodec):
        raise TypeError(
            f"{type(found).__name__} has a loss but no error feedback: it needs residuals(), load_residuals(...) and "
            "flush(...), or is_lossless = True"
        )
    return found
