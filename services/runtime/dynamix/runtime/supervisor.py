"""What systemd asks of a process that it started, by variables of its own."""

import os
from collections.abc import Mapping
from typing import NamedTuple


class Supervisor(NamedTuple):
    """Where and how often to notify: sd_notify(3) and sd_watchdog_enabled(3)."""

    notify_socket: str = ""
    """The datagram socket that takes notifications: a path, or `@name` of an abstract one; empty: none asks."""
    watchdog_s: float = 0.0
    """The process has to notify at least so often that it is alive; 0: not asked for."""


def read_supervisor(environ: Mapping[str, str]) -> Supervisor:
    """What systemd asks of this process. A watchdog that was meant for another one, such as its parent, is not ours.

    Raises:
        ValueError: for a socket of another family, and for what is no number of microseconds.
    """
    address = environ.get("NOTIFY_SOCKET", "")
    if address and not address.startswith(("/", "@")):
        raise ValueError(f"NOTIFY_SOCKET={address!r}: only a path or @name can be notified; unset it")
    usec = environ.get("WATCHDOG_USEC", "")
    if not address or not usec or environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return Supervisor(address)
    if not usec.isdecimal():
        raise ValueError(f"WATCHDOG_USEC={usec!r} is no number of microseconds")
    return Supervisor(address, int(usec) / 1e6)
