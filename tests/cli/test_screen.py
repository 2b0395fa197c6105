"""`dynamix top` on a real pseudo-terminal: it draws, keeps to the size, and leaves the terminal as it was."""

import asyncio
import fcntl
import os
import pty
import signal
import struct
import sys
import termios
from collections.abc import AsyncIterator

import pytest
from tests.support import examples

from dynamix.cli.services import bus_environment
from dynamix.runtime.bus import Bus
from dynamix.runtime.bus.provision import provision
from dynamix.runtime.embedded import EmbeddedServer

ALTERNATE_SCREEN, NORMAL_SCREEN = b"\x1b[?1049h", b"\x1b[?1049l"


class Terminal:
    """The master side of a pseudo-terminal."""

    def __init__(self, width: int, height: int) -> None:
        self._master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        self.before = termios.tcgetattr(self.slave)
        self.shown = b""
        self._news = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._master, self._read)

    def _read(self) -> None:
        self.shown += os.read(self._master, 1 << 16)
        self._news.set()

    async def shows(self, text: bytes) -> None:
        """Wait until something was written."""
        async with asyncio.timeout(20):
            while text not in self.shown:
                self._news.clear()
                await self._news.wait()

    def types(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._master)
        os.close(self._master)
        os.close(self.slave)


@pytest.fixture
async def server() -> AsyncIterator[EmbeddedServer]:
    """A broker on which a job has run one window."""
    async with EmbeddedServer() as running:
        bus = await Bus.connect(running.settings, name="test")
        await provision(bus)
        for message in (examples.job(), examples.window(), examples.action()):
            await bus.publish(message)
        await bus.close()
        yield running


async def top(server: EmbeddedServer, terminal: Terminal) -> asyncio.subprocess.Process:
    command = [sys.executable, "-m", "dynamix.cli.main", "top"]
    environ = {**os.environ, **bus_environment(server.settings), "TERM": "xterm-256color"}
    environ = {key: value for key, value in environ.items() if key not in ("COLUMNS", "LINES")}
    ends = {"stdin": terminal.slave, "stdout": terminal.slave, "stderr": terminal.slave}
    return await asyncio.create_subprocess_exec(*command, env=environ, **ends)


@pytest.mark.parametrize("leave", ["q", "\x1b", "SIGINT"])
async def test_it_draws_until_one_leaves_and_gives_the_terminal_back(server: EmbeddedServer, leave: str) -> None:
    terminal = Terminal(80, 24)
    process = await top(server, terminal)
    try:
        await terminal.shows(b"mnist-0a1b2c3d")
        await terminal.shows(b"no change")
        if leave == "SIGINT":
            process.send_signal(signal.SIGINT)
        else:
            terminal.types(leave.encode())
        async with asyncio.timeout(20):
            code = await process.wait()
        await terminal.shows(NORMAL_SCREEN)
        assert code == (130 if leave == "SIGINT" else 0)
        assert terminal.shown.index(ALTERNATE_SCREEN) < terminal.shown.index(b"mnist-0a1b2c3d")
        assert termios.tcgetattr(terminal.slave) == terminal.before
        assert b"Traceback" not in terminal.shown
    finally:
        terminal.close()
