"""Codecs by name: those of the core, and those that packages register in the group `dynamix.codecs`.

An entry point names a class without arguments, like those here; names of the core are looked up first.
"""

from collections.abc import Callable

import torch

from dynamix.runtime.extensions import Group, extension_names, load_extension
from dynamix.schemas.spelling import suggestion
from dynamix.trainer.exchange.codec import ErrorFeedback, ExchangeCodec, PlainExchange
from dynamix.trainer.exchange.rows import RowsExchange

from .narrow import Cast, Int8, NarrowExchange

GROUP: Group = "dynamix.codecs"
"""Group of entry points."""

CODECS: dict[str, Callable[[], ExchangeCodec]] = {
    "none": PlainExchange,
    "rows": RowsExchange,
    "bf16": lambda: NarrowExchange("bf16", Cast(torch.bfloat16)),
    "fp16": lambda: NarrowExchange("fp16", Cast(torch.float16)),
    "int8": lambda: NarrowExchange("int8", Int8()),
}
"""Codecs of the core; an instance is made once per model."""


def exchange_codec(name: str) -> ExchangeCodec:
    """A new codec for one model.

    Raises:
        ValueError: when neither the core nor an installed package has the name, or what a package registers does not
            fit.
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
    if not found.is_lossless and not isinstance(found, ErrorFeedback):
        raise TypeError(f"{type(found).__name__} rounds: it must derive from {ErrorFeedback.__qualname__}")
    return found
