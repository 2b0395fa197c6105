"""The bpf(2) system call, as much of it as the probe needs; attributes are laid out as in linux/bpf.h."""

import ctypes
import errno
import os
import struct
from typing import NamedTuple

NUMBERS = {"x86_64": 321, "aarch64": 280, "riscv64": 280, "ppc64le": 361, "s390x": 351}
"""Number of the system call, by machine."""

INGRESS, SOCK_OPS = 0, 3
"""Types of attachment to a control group (enum bpf_attach_type)."""

_MAP_LOOKUP, _OBJ_GET_INFO_BY_FD, _LINK_CREATE = 1, 15, 28
_INFO_BYTES = 256


class ProbeError(RuntimeError):
    """The probe cannot work here; the message has the reason and the fix."""


class ProgramInfo(NamedTuple):
    """The kernel's record of a loaded program."""

    name: str
    run_time_ns: int
    """While statistics are on: kernel.bpf_stats_enabled."""
    num_runs: int


def attach_link(program: int, directory: int, kind: int) -> int:
    """Attach for as long as the returned descriptor lives (Linux 5.7)."""
    return call(_LINK_CREATE, attribute("=IIII", program, directory, kind, 0))


def program_info(program: int) -> ProgramInfo:
    """The kernel's information about a program."""
    info = ctypes.create_string_buffer(_INFO_BYTES)
    call(_OBJ_GET_INFO_BY_FD, attribute("=IIQ", program, _INFO_BYTES, ctypes.addressof(info)))
    run_time_ns, num_runs = struct.unpack_from("=QQ", info, 192)
    return ProgramInfo(info.raw[64:80].partition(b"\0")[0].decode("ascii", "replace"), run_time_ns, num_runs)


class BpfMap:
    """A map by its descriptor. Its buffers are made once: a look-up takes 3 us, most of them not the system call's."""

    def __init__(self, descriptor: int, key: struct.Struct, value: struct.Struct) -> None:
        self._key, self._value = key, value
        self._held_key = ctypes.create_string_buffer(key.size)
        self._held_value = ctypes.create_string_buffer(value.size)
        addresses = ctypes.addressof(self._held_key), ctypes.addressof(self._held_value)
        self._attribute = attribute("=I4xQQ", descriptor, *addresses)

    def look_up(self, key: int) -> tuple[int, ...] | None:
        """The value's fields; `None` where the map has no such key."""
        self._key.pack_into(self._held_key, 0, key)
        try:
            call(_MAP_LOOKUP, self._attribute)
        except FileNotFoundError:
            return None
        return self._value.unpack_from(self._held_value)


def attribute(layout: str, *values: int) -> ctypes.Array[ctypes.c_char]:
    """Zeros after what is set: a kernel that knows more fields takes them as not given."""
    made = ctypes.create_string_buffer(64)
    struct.pack_into(layout, made, 0, *values)
    return made


_LIBC = ctypes.CDLL(None, use_errno=True)
_NUMBER = NUMBERS.get(os.uname().machine)


def call(command: int, given: ctypes.Array[ctypes.c_char]) -> int:
    """The system call's result. Raises OSError as the kernel refuses; ENOSYS where the call's number is not known."""
    if _NUMBER is None:
        raise OSError(errno.ENOSYS, f"no eBPF on {os.uname().machine}: only on {', '.join(NUMBERS)}")
    result: int = _LIBC.syscall(_NUMBER, command, given, len(given))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
