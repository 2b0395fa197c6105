"""Checks of a script's arguments by the type and the bounds that they are declared with."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from dynamix.schemas.spelling import choices

AtLeast0 = Annotated[int, Meta(ge=0)]
AtLeast1 = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(ge=0, le=1)]


def checked(name: str, value: Any, kind: Any) -> Any:
    """A script's argument as the type that it is declared with; numbers of numpy and torch count.

    Raises:
        ValueError: naming the argument, its value and what it must be.
    """
    try:
        return msgspec.convert(value.tolist() if hasattr(value, "tolist") else value, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"{name}={value!r}: {choices(kind) or error}") from None
