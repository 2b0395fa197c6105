"""The smallest eBPF program: whether the kernel takes it says more than any reading of its settings."""

import ctypes
import os
import struct

from dynamix.collector.ebpf.syscall import NUMBERS

_PROG_LOAD, _CGROUP_SKB = 5, 8
_INSTRUCTION = struct.Struct("=BBhi")
_MOVE, _EXIT = 0xB7, 0x95
_LET_EVERY_PACKET_PASS = _INSTRUCTION.pack(_MOVE, 0, 0, 1) + _INSTRUCTION.pack(_EXIT, 0, 0, 0)
"""r0 = 1; return r0."""


def load_smallest_program() -> None:
    """Load a program for a control group's packets and drop it at once; it is attached nowhere.

    Raises:
        OSError: as the kernel refuses it; ENOSYS also where the call's number is not known.
    """
    instructions = ctypes.create_string_buffer(_LET_EVERY_PACKET_PASS)
    license_ = ctypes.create_string_buffer(b"Apache-2.0")
    attribute = ctypes.create_string_buffer(72)
    addresses = (ctypes.addressof(instructions), ctypes.addressof(license_))
    struct.pack_into("=IIQQ", attribute, 0, _CGROUP_SKB, 2, *addresses)
    libc = ctypes.CDLL(None, use_errno=True)
    program = libc.syscall(NUMBERS.get(os.uname().machine, -1), _PROG_LOAD, attribute, len(attribute))
    if program < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    os.close(program)
