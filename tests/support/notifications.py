"""systemd's notification socket, as a test holds it: what a service says of itself, line by line."""

import asyncio
import contextlib
import socket
from pathlib import Path
from typing import Self


class NotificationSocket:
    """A datagram socket at a path or, with a leading `@`, at an abstract name; the environment that leads to it."""

    def __init__(self, address: Path | str) -> None:
        self.address = str(address)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._lines: list[str] = []

    def __enter__(self) -> Self:
        self._socket.bind(f"\0{self.address[1:]}" if self.address.startswith("@") else self.address)
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def environ(self, watchdog_s: float = 0.0) -> dict[str, str]:
        """What systemd sets for a unit with `Type=notify` and, perhaps, `WatchdogSec=`."""
        usec = {"WATCHDOG_USEC": f"{watchdog_s * 1e6:.0f}"} if watchdog_s else {}
        return {"NOTIFY_SOCKET": self.address, **usec}

    async def line(self, timeout_s: float = 30.0) -> str:
        """The next line; TimeoutError when none comes."""
        while not self._lines:
            async with asyncio.timeout(timeout_s):
                datagram = await asyncio.get_running_loop().sock_recv(self._socket, 4096)
            self._lines = datagram.decode().split("\n")
        return self._lines.pop(0)

    async def lines_until(self, last: str) -> list[str]:
        """All lines up to this one, which is left out."""
        found = []
        while (line := await self.line()) != last:
            found.append(line)
        return found

    async def silence(self, seconds: float) -> None:
        """Wait until nothing came for so long; what comes before is left out."""
        self._lines = []
        with contextlib.suppress(TimeoutError):
            while True:
                await self.line(timeout_s=seconds)
