"""The bpf(2) system call, as much of it as the probe needs; attributes are laid out as in linux/bpf.h."""

import ctypes
import os
import struct
from functools import cache
from typing import NamedTuple

NUMBERS = {"x86_64": 321, "aarch64": 280, "riscv64": 280, "ppc64le": 361, "s390x": 351}
"""Number of the system call, by machine."""

INGRESS, SOCK_OPS = 0, 3
"""Types of attachment to a control group (enum bpf_attach_type)."""

_MAP_LOOKUP, _MAP_UPDATE = 1, 2
_PROG_ATTACH, _PROG_DETACH = 8, 9
_PROG_GET_FD_BY_ID, _MAP_GET_FD_BY_ID, _OBJ_GET_INFO_BY_FD, _PROG_QUERY, _LINK_CREATE = 13, 14, 15, 16, 28
_ALLOW_MULTI = 2
_MAX_PROGRAMS = 64
"""Most programs that the kernel permits at one place (BPF_CGROUP_MAX_PROGS)."""
_MAX_MAPS = 64
_INFO_BYTES = 256


class ProbeError(RuntimeError):
    """The probe cannot work here; the message has the reason and the fix."""


class ProgramInfo(NamedTuple):
    """The kernel's record of a loaded program."""

    name: str
    map_ids: tuple[int, ...]
    run_time_ns: int
    """While statistics are on: kernel.bpf_stats_enabled."""
    num_runs: int


def attach_link(program: int, directory: int, kind: int) -> int:
    """Attach for as long as the returned descriptor lives (Linux 5.7)."""
    return _call(_LINK_CREATE, _attribute("=IIII", program, directory, kind, 0))


def attach(program: int, directory: int, kind: int) -> None:
    """Attach until it is detached, beside what is attached already."""
    _call(_PROG_ATTACH, _attribute("=IIII", directory, program, kind, _ALLOW_MULTI))


def detach(program: int, directory: int, kind: int) -> None:
    """Undo `attach`."""
    _call(_PROG_DETACH, _attribute("=IIII", directory, program, kind, 0))


def attached(directory: int, kind: int) -> list[int]:
    """Ids of the programs attached to this very directory."""
    ids = (ctypes.c_uint32 * _MAX_PROGRAMS)()
    attribute = _attribute("=IIIIQI", directory, kind, 0, 0, ctypes.addressof(ids), _MAX_PROGRAMS)
    _call(_PROG_QUERY, attribute)
    (count,) = struct.unpack_from("=I", attribute, 24)
    return list(ids[:count])


def open_program(identity: int) -> int:
    """Descriptor of a program (CAP_SYS_ADMIN)."""
    return _call(_PROG_GET_FD_BY_ID, _attribute("=I", identity))


def open_map(identity: int) -> int:
    """Descriptor of a map (CAP_SYS_ADMIN)."""
    return _call(_MAP_GET_FD_BY_ID, _attribute("=I", identity))


def program_info(program: int) -> ProgramInfo:
    """The kernel's information about a program."""
    ids = (ctypes.c_uint32 * _MAX_MAPS)()
    info = ctypes.create_string_buffer(_INFO_BYTES)
    struct.pack_into("=IQ", info, 52, _MAX_MAPS, ctypes.addressof(ids))
    _call(_OBJ_GET_INFO_BY_FD, _attribute("=IIQ", program, _INFO_BYTES, ctypes.addressof(info)))
    (num_maps,) = struct.unpack_from("=I", info, 52)
    run_time_ns, num_runs = struct.unpack_from("=QQ", info, 192)
    return ProgramInfo(_name(info.raw[64:80]), tuple(ids[:num_maps]), run_time_ns, num_runs)


def map_name(table: int) -> str:
    """Name of a map."""
    info = ctypes.create_string_buffer(_INFO_BYTES)
    _call(_OBJ_GET_INFO_BY_FD, _attribute("=IIQ", table, _INFO_BYTES, ctypes.addressof(info)))
    return _name(info.raw[24:40])


class BpfMap:
    """A map by its descriptor. Its buffers are made once: a look-up takes 3 us, most of them not the system call's."""

    def __init__(self, descriptor: int, key: struct.Struct, value: struct.Struct) -> None:
        self._key, self._value = key, value
        self._held_key, self._held_value = (
            ctypes.create_string_buffer(key.size),
            ctypes.create_string_buffer(value.size),
        )
        addresses = ctypes.addressof(self._held_key), ctypes.addressof(self._held_value)
        self._attribute = _attribute("=I4xQQ", descriptor, *addresses)

    def look_up(self, key: int) -> tuple[int, ...] | None:
        """The value's fields; `None` where the map has no such key."""
        self._key.pack_into(self._held_key, 0, key)
        try:
            _call(_MAP_LOOKUP, self._attribute)
        except FileNotFoundError:
            return None
        return self._value.unpack_from(self._held_value)

    def update(self, key: int, *fields: int) -> None:
        """Set a value."""
        self._key.pack_into(self._held_key, 0, key)
        self._value.pack_into(self._held_value, 0, *fields)
        _call(_MAP_UPDATE, self._attribute)


def _attribute(layout: str, *values: int) -> ctypes.Array[ctypes.c_char]:
    """Zeros after what is set: a kernel that knows more fields takes them as not given."""
    attribute = ctypes.create_string_buffer(64)
    struct.pack_into(layout, attribute, 0, *values)
    return attribute


def _call(command: int, attribute: ctypes.Array[ctypes.c_char]) -> int:
    result: int = _libc().syscall(_number(), command, attribute, len(attribute))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


@cache
def _number() -> int:
    machine = os.uname().machine
    if machine not in NUMBERS:
        raise ProbeError(f"no eBPF on {machine}: only on {', '.join(NUMBERS)}")
    return NUMBERS[machine]


def _name(raw: bytes) -> str:
    return raw.partition(b"\0")[0].decode("ascii", "replace")
