"""Layout of the eBPF program: the C file, its programs and maps, and the structure of their values."""

import struct
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).with_name("sockets.bpf.c")
MAX_OPEN = 131_072
"""Slots for TCP sockets under the control group, a power of two; 8 MB of kernel memory."""
NUM_WAYS = 8
"""Slots that a socket may be in: where it is and the order of the ways are as in the C program."""
SCATTER = 0x9E3779B97F4A7C15
MAX_CLOSED = 4096
"""Closed sockets kept for the next reading, the newest."""

INGRESS, SOCKETS = "dynamix_ingress", "dynamix_sockets"
PROGRAMS = (INGRESS, SOCKETS)
MAPS = ("sockets", "closed", "left_out", "owner")

KEY = struct.Struct("=Q")
INDEX = struct.Struct("=I")
COUNTERS = struct.Struct("=QQQQQQQQ")
"""Cookie and owner, then `Counters`, then nothing."""
NUMBER = struct.Struct("=Q")
OWNER = struct.Struct("=QQQ")


class Counters(NamedTuple):
    """Counters of one socket since its connection began."""

    received_bytes: int
    acked_bytes: int
    retransmits: int
    """Retransmitted segments."""
    srtt_sum_us: int
    """Sum of the smoothed round trip times before each of `num_rtts` samples but the first."""
    num_rtts: int


class Owner(NamedTuple):
    """The process that attached the programs."""

    pid: int
    start_ticks: int
    pid_namespace: int
