"""The terminal: frames drawn when something changed, `q` and Ctrl-C to leave."""

import asyncio
import contextlib
import os
import sys
import termios
import time
import tty
from collections.abc import Iterator

from rich.console import Console, Group
from rich.live import Live

from dynamix.cli.board.feed import Feed
from dynamix.cli.errors import first_error

from .frame import frame

MIN_INTERVAL_S = 0.2
"""Frames are no closer than this, however fast windows come."""
TICK_S = 1.0
"""Without news a frame is drawn for the ages in it."""
QUIT_KEYS = (b"q", b"Q", b"\x1b", b"")
"""Escape alone, not an arrow's sequence; nothing read is a terminal that is gone."""


def show(feed: Feed) -> None:
    """Print one frame."""
    console = Console()
    console.print(current(feed, console))


async def watch(feed: Feed) -> None:
    """Draw until the person leaves."""
    console = Console()
    left = asyncio.Event()
    following = asyncio.create_task(feed.follow())
    following.add_done_callback(lambda _: left.set())
    with _keys(left), Live(console=console, screen=True, auto_refresh=False) as live:
        while not left.is_set():
            live.update(current(feed, console), refresh=True)
            await _news(feed, left)
    following.cancel()
    try:
        await following
    except asyncio.CancelledError:
        return
    except BaseExceptionGroup as group:
        raise first_error(group) from group


def current(feed: Feed, console: Console) -> Group:
    """The frame for the console's size now."""
    now_ns, now_s, size = time.time_ns(), time.monotonic(), console.size
    room = {"width": size.width, "height": size.height}
    lines = frame(feed.board, feed.heartbeats, missing=feed.missing, now_ns=now_ns, now_s=now_s, **room)
    return Group(*lines)


async def _news(feed: Feed, left: asyncio.Event) -> None:
    await asyncio.sleep(MIN_INTERVAL_S)
    waiting = [asyncio.create_task(feed.changed.wait()), asyncio.create_task(left.wait())]
    try:
        await asyncio.wait(waiting, timeout=TICK_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        feed.changed.clear()
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


@contextlib.contextmanager
def _keys(left: asyncio.Event) -> Iterator[None]:
    """Single keys without Enter, while the context lasts; nothing where standard input is no terminal."""
    if not sys.stdin.isatty():
        yield
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    loop = asyncio.get_running_loop()
    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, lambda: left.set() if os.read(descriptor, 64) in QUIT_KEYS else None)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
