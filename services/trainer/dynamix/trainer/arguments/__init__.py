"""Checks of a script's arguments: each fault is one sentence with the argument's name, its value and the fix."""

import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence, Sized
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from msgspec import Meta

from dynamix.schemas.policies import POLICY_OPTIONS, PolicyOptions, check_options, option_value
from dynamix.schemas.subjects import is_token


def whole_number(name: str, value: Any, instead: str = "a whole number") -> int:
    """The value as an `int`; those of numpy and torch count.

    Raises:
        TypeError: for text, for a number with a fraction, and for anything else; `instead` says what to pass.
    """
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{name}={value!r} is {_type_of(value)}: pass {instead}")


def names_of(argument: str, value: Any, example: str) -> tuple[Any, ...]:
    """A list of names as a tuple.

    Raises:
        TypeError: for one name alone, which would be taken for its letters, and for what is no list.
    """
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"{argument}={value!r} is {_type_of(value)}: pass a list, such as {[example]}")
    return tuple(value)


def number(name: str, value: Any) -> float:
    """The value as a `float`.

    Raises:
        TypeError: for text, for a tensor of several elements, and for anything else that is not a number.
    """
    if not isinstance(value, str | bytes):
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError):
            pass
    raise TypeError(f"{name}={value!r} is {_type_of(value)}: pass one number")


def check_switch(name: str, value: Any) -> None:
    """Raise TypeError unless the value is `True` or `False`: text such as "no" counts as true in Python."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} is {_type_of(value)}: pass True or False")


def check_choice(name: str, value: str, choices: Collection[str]) -> None:
    """Raise ValueError unless the value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name}={value!r}: use one of {', '.join(choices)}")


def checked(name: str, value: Any, hint: Any) -> Any:
    """An option's value, by the type and bounds that it is declared with; only plain types are checked.

    Raises:
        TypeError: for another type.
        ValueError: outside of the bounds, or for what is no choice.
    """
    if get_origin(hint) in (Union, UnionType):
        if value is None:
            return None
        hint = get_args(hint)[0]
    meta = next((each for each in get_args(hint) if isinstance(each, Meta)), Meta())
    plain = hint if meta == Meta() else get_args(hint)[0]
    if plain is bool:
        check_switch(name, value)
    elif get_origin(plain) is Literal:
        check_choice(name, value, get_args(plain))
    elif plain in (int, float):
        value = whole_number(name, value) if plain is int else number(name, value)
        if (meta.ge is not None and value < meta.ge) or (meta.lt is not None and not value < meta.lt):
            limit = "" if meta.lt is None else f", below {meta.lt}"
            raise ValueError(f"{name}={value}: use at least {meta.ge}{limit}")
    return value


def share(name: str, value: Any) -> float:
    """The value as a `float` from 0 to 1.

    Raises:
        TypeError: as `number`.
        ValueError: when it is outside of 0 to 1.
    """
    found = number(name, value)
    if not 0 <= found <= 1:
        fix = f"pass {found / 100:g}" if 1 < found <= 100 else "pass a number from 0 to 1"
        raise ValueError(f"{name}: {found:g} is no share: {fix}")
    return found


def sizes_of(local_batch_size: int | Sequence[int], world_size: int) -> tuple[int, ...]:
    """One size per rank.

    Raises:
        TypeError: when a size is no whole number.
        ValueError: when a sequence does not hold one size per rank, or there is no sample at all.
    """
    name, instead = "local_batch_size", "a whole number, or a list with one per rank"
    if isinstance(local_batch_size, str | bytes) or not isinstance(local_batch_size, Sized):
        sizes = (whole_number(name, local_batch_size, instead),) * world_size
    elif len(local_batch_size) != world_size:
        raise ValueError(f"local_batch_size holds {len(local_batch_size)} sizes for {world_size} ranks")
    else:
        sizes = tuple(whole_number(f"{name}[{rank}]", size) for rank, size in enumerate(local_batch_size))
    if min(sizes) < 0 or sum(sizes) < 1:
        raise ValueError(
            f"local_batch_size={local_batch_size!r}: pass at least 1; in a list a rank may have 0 beside others"
        )
    return sizes


def policy_options_of(given: PolicyOptions | None) -> dict[str, float | str]:
    """The options of a policy, numbers as `float`.

    Raises:
        TypeError: when it is not a dict of names with numbers or text.
        ValueError: for a number that is not finite, and for text that messages cannot hold.
    """
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(
            f"policy_options={given!r} is {_type_of(given)}: pass a dict of names and numbers, for example "
            "{'noise_multiplier': 2}"
        )
    options: dict[str, float | str] = {}
    for name, value in (given or {}).items():
        if not isinstance(name, str):
            raise TypeError(f"policy_options: the name {name!r} is {_type_of(name)}: pass text")
        found = option_value(value) if isinstance(value, str) else number(f"policy_options[{name!r}]", value)
        if not (is_token(found) if isinstance(found, str) else math.isfinite(found)):
            raise ValueError(
                f"policy_options[{name!r}]={value!r}: pass a finite number, or a name of 1 to 63 of the characters "
                "a-z, 0-9 and '-'"
            )
        options[name] = found
    return options


def check_policy_options(policy: str, given: PolicyOptions) -> None:
    """Refuse options that a policy of ours does not have, and values that they cannot have; others' are not known.

    Raises:
        ValueError: naming the option and what there is.
    """
    if (known := POLICY_OPTIONS.get(policy)) is not None:
        check_options(policy, known, given)


def _type_of(value: object) -> str:
    return "text" if isinstance(value, str) else f"of type {type(value).__name__}"
