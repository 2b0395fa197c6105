"""A service that blocks its event loop when a file appears: `python -m tests.support.stuck_service --trigger FILE`."""

import asyncio
import ctypes
import sys
import threading
import time
from pathlib import Path

import msgspec

from dynamix.runtime.service import Context, run


class StuckSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the tests change."""

    trigger: str = ""
    """Block once this file is there."""
    block_s: float = 0.0
    """For so long; 0: for ever."""
    hold_lock: bool = False
    """Block all threads, with Python's interpreter lock held, for ever."""


async def main(context: Context[StuckSettings]) -> None:
    while not Path(context.settings.trigger).exists():  # noqa: ASYNC110, ASYNC240 - the test has no other way in
        await asyncio.sleep(0.01)
    if context.settings.hold_lock:
        hold_interpreter_lock()
    sit_still(context.settings.block_s)
    context.count("awake_again")
    await asyncio.Event().wait()


def sit_still(seconds: float) -> None:
    """What must be named in the stack."""
    if seconds:
        time.sleep(seconds)
    else:
        threading.Event().wait()


def hold_interpreter_lock() -> None:
    """What must be named in the stack, too."""
    ctypes.PyDLL(None).pause()


if __name__ == "__main__":
    sys.exit(run("reward", StuckSettings, main))
