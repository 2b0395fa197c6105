"""The idx format of MNIST and its successors."""

import struct

import numpy as np
import numpy.typing as npt

from .files import CorruptDataError

_IDX_UBYTE = 0x08


def read_idx(content: bytes, name: str) -> npt.NDArray[np.uint8]:
    """The array in an idx file of unsigned bytes: 0, 0, type, number of dimensions, sizes (big-endian), values.

    Raises:
        CorruptDataError: when the header is another's, or the length does not fit it.
    """
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != _IDX_UBYTE:
        raise CorruptDataError(f"{name} is no idx file of unsigned bytes")
    num_dimensions = content[3]
    start = 4 + 4 * num_dimensions
    if len(content) < start:
        raise CorruptDataError(f"{name} ends in its header")
    shape = struct.unpack(f">{num_dimensions}I", content[4:start])
    if len(content) - start != int(np.prod(shape, dtype=np.int64)):
        raise CorruptDataError(f"{name} holds {len(content) - start} values, its header says {shape}")
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape).copy()
