"""What the collector does not ask of bpf(2): to time programs, and to load one that does nothing."""

import ctypes
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from dynamix.collector.ebpf.syscall import NUMBERS

_PROG_LOAD, _ENABLE_STATS = 5, 32
_CGROUP_SKB = 8
_RETURN_1 = bytes.fromhex("b700000001000000 9500000000000000")
"""Two instructions: r0 = 1, exit."""
_LICENSE = b"Apache-2.0\0"
EMPTY = "bench_empty"


@contextmanager
def run_times_counted() -> Iterator[None]:
    """What kernel.bpf_stats_enabled=1 does, for as long as we live: nothing to put back, however we end (Linux 5.8)."""
    descriptor = _call(_ENABLE_STATS, struct.pack("=I", 0))
    try:
        yield
    finally:
        os.close(descriptor)


@contextmanager
def empty_program() -> Iterator[int]:
    """Descriptor of a program for ingress that lets every packet pass: what clock and jump cost by themselves."""
    code, license_ = ctypes.create_string_buffer(_RETURN_1), ctypes.create_string_buffer(_LICENSE)
    attribute = struct.pack(
        "=IIQQ", _CGROUP_SKB, len(_RETURN_1) // 8, ctypes.addressof(code), ctypes.addressof(license_)
    )
    attribute += struct.pack("=IIQII16s", 0, 0, 0, 0, 0, EMPTY.encode())
    descriptor = _call(_PROG_LOAD, attribute)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _call(command: int, attribute: bytes) -> int:
    buffer = ctypes.create_string_buffer(attribute, 128)
    libc = ctypes.CDLL(None, use_errno=True)
    result: int = libc.syscall(NUMBERS[os.uname().machine], command, buffer, len(buffer))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
