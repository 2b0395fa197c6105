"""The carry of a policy: its state as one msgspec struct, in msgpack; numpy arrays as float32."""

from typing import Any, TypeVar

import msgspec
import numpy as np

S = TypeVar("S", bound=msgspec.Struct)

_encoder = msgspec.msgpack.Encoder(enc_hook=lambda array: array.astype("<f4").tobytes())


def pack(state: msgspec.Struct) -> bytes:
    """The carry for a state; arrays must have one dimension."""
    return _encoder.encode(state)


def unpack(kind: type[S], carry: bytes) -> S:
    """The state in a carry; the initial one from an empty carry, or from anything that is not such a state."""
    try:
        return msgspec.msgpack.decode(carry, type=kind, dec_hook=_array)
    except msgspec.DecodeError:
        return kind()


def _array(_: type, packed: Any) -> Any:
    if not isinstance(packed, bytes) or len(packed) % 4:
        raise ValueError("not an array of float32")
    return np.frombuffer(packed, dtype="<f4").astype(np.float64)
