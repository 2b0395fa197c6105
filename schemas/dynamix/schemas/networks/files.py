"""The file of a network: safetensors, its metadata one JSON text. Reading checks everything and runs nothing."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors

FORMAT = 1
METADATA_KEY = "dynamix"
MAX_BYTES = 32 << 20
"""Our networks take a few hundred KB; what is larger is something else."""
_NEVER_NEGATIVE = (".count", ".m2", ".step", ".exp_avg_sq")

Array = npt.NDArray[Any]
_KINDS: dict[str, str] = {"F32": "<f4", "F64": "<f8", "I64": "<i8"}


class NetworkFileError(ValueError):
    """A file that is no network of ours; the text says what is wrong with it and how to fix it."""


def metadata_text(data: bytes) -> str:
    """The JSON text of a file's metadata.

    Raises:
        NetworkFileError: when it is no such file.
    """
    if len(data) > MAX_BYTES:
        raise NetworkFileError(f"{len(data)} bytes are over the limit of {MAX_BYTES}")
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > len(data) - 8:
        raise NetworkFileError("not a safetensors file, or cut off: its header is not there")
    try:
        header: Any = json.loads(data[8 : 8 + length])
        text = header["__metadata__"][METADATA_KEY]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise NetworkFileError(f"not a policy file of DYNAMIX: its header has no {METADATA_KEY!r} metadata") from error
    if not isinstance(text, str):
        raise NetworkFileError(f"not a policy file of DYNAMIX: its {METADATA_KEY!r} metadata is not a text")
    return text


def check_format(number: int) -> None:
    """Raise NetworkFileError for a format that this program does not read."""
    if number != FORMAT:
        raise NetworkFileError(f"format {number}, this program reads {FORMAT}")


def check_names(what: str, theirs: Sequence[object], ours: Sequence[object]) -> None:
    """Raise NetworkFileError for a list of names that is not part of ours.

    A file may lack what this program has, as one that is older does; what it names must be there.
    """
    if unknown := [str(name) for name in theirs if name not in ours]:
        raise NetworkFileError(
            f"its list of {what} names {', '.join(unknown)}, which this program does not have: use the dynamix-batch "
            "that wrote it or a newer one, or learn the policy again"
        )
    if not theirs or len(set(theirs)) < len(theirs):
        raise NetworkFileError(f"its list of {what} is empty or names something twice")


def check_actions(theirs: Sequence[float], ours: Sequence[float]) -> None:
    """Raise NetworkFileError for actions that are not part of ours, or do not begin with the neutral one."""
    check_names("actions", theirs, ours)
    if theirs[0] != ours[0]:
        raise NetworkFileError(f"its first action is {theirs[0]:g}, not the neutral one, {ours[0]:g}")


def read_tensors(data: bytes) -> dict[str, Array]:
    """All tensors, of finite numbers.

    Raises:
        NetworkFileError: naming the tensor that is not.
    """
    try:
        found: list[tuple[str, dict[str, Any]]] = safetensors.deserialize(data)  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        raise NetworkFileError(f"its tensors cannot be read: {error}") from error
    return {name: _array(name, entry) for name, entry in found}


def check_tensors(tensors: Mapping[str, Array], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise NetworkFileError unless each expected tensor is there in its shape, and none holds impossible numbers."""
    for name, shape in expected.items():
        found = tensors.get(name)
        if found is None or found.shape != shape:
            raise NetworkFileError(
                f"tensor {name!r} must be of shape {shape}, not {getattr(found, 'shape', 'missing')}"
            )
    for name, array in tensors.items():
        if name.endswith(_NEVER_NEGATIVE) and (array < 0).any():
            raise NetworkFileError(f"tensor {name!r} holds a negative number")


def _array(name: str, entry: dict[str, Any]) -> Array:
    kind = _KINDS.get(entry["dtype"])
    if kind is None:
        raise NetworkFileError(f"tensor {name!r} is of type {entry['dtype']}: use one of {', '.join(_KINDS)}")
    array = np.frombuffer(entry["data"], dtype=kind).reshape(entry["shape"])
    if not np.isfinite(array).all():
        raise NetworkFileError(f"tensor {name!r} holds numbers that are not finite")
    return array
