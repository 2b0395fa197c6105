"""Notifications for systemd: the service is ready, alive, stopping, and in words why it cannot work now."""

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from typing import Self

from dynamix.runtime.rate_limit import RateLimit
from dynamix.runtime.supervisor import Supervisor

logger = logging.getLogger(__name__)

LOOK_S = 0.5
"""How often the state is looked at; a look that has nothing to tell costs 5 us."""
PER_WATCHDOG = 4
"""Signs of life within the time after which systemd takes the service for stuck."""


class SystemdNotifier:
    """Notifies systemd between `async with` and the end of the block, by datagrams of `KEY=value` lines: sd_notify(3).

    It works in the service's own event loop, like `/livez`: one that is stuck sends no `WATCHDOG=1`, and systemd ends
    the process and starts it again (`WatchdogSec=`). That also covers what `health.watchdog` cannot see: code that
    keeps the interpreter lock, and a process that was stopped. `READY=1` is sent once, when `/readyz` would answer 200.

    Args:
        supervisor: where to, and how often; without a socket nothing is sent.
        not_ready: why the service cannot work now; empty when it can.
        clock: seconds, monotonic.
    """

    def __init__(
        self, supervisor: Supervisor, not_ready: Callable[[], str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._address = supervisor.notify_socket
        if self._address.startswith("@"):
            self._address = f"\0{self._address[1:]}"
        self._sign_s = supervisor.watchdog_s / PER_WATCHDOG
        self._look_s = min(LOOK_S, self._sign_s or LOOK_S)
        self._not_ready = not_ready
        self._clock = clock
        self._status: str | None = None
        self._was_ready = False
        self._sign_due_s = clock()
        self._limit = RateLimit(per_s=1 / 60)
        self._socket: socket.socket | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        if self._address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
            self._look()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def stopping(self) -> None:
        """Notify at once that the service ends in order; a supervisor then waits for it."""
        self._send("STOPPING=1")

    def _look(self) -> None:
        """Run in the loop, again and again; an error here would end the signs of life, and systemd would restart us."""
        reason, now_s = self._not_ready(), self._clock()
        lines = []
        if reason != self._status:
            lines.append(f"STATUS={reason or 'working'}")
        if not reason and not self._was_ready:
            lines.append("READY=1")
        if self._sign_s and now_s >= self._sign_due_s:
            lines.append("WATCHDOG=1")
        if lines and self._send("\n".join(lines)):
            self._status, self._was_ready = reason, self._was_ready or not reason
            if "WATCHDOG=1" in lines:
                self._sign_due_s = now_s + self._sign_s
        self._timer = asyncio.get_running_loop().call_later(self._look_s, self._look)

    def _send(self, text: str) -> bool:
        """Whether systemd took it: a full socket is tried again at the next look, never waited for."""
        if self._socket is None:
            return False
        try:
            self._socket.sendto(text.encode(), self._address)
        except BlockingIOError:
            return False
        except OSError as error:
            if self._limit.allow("refused"):
                logger.warning("systemd cannot be notified (NOTIFY_SOCKET): %s", error)
            return False
        return True
