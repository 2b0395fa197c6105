"""A service of a few lines, run as a process: `python -m tests.support.small_service [--mode ...]`."""

import asyncio
import contextlib
import ctypes
import os
import sys
import threading
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from dynamix.cli.services import bus_environment
from dynamix.runtime.service import Context, StartError, run

from .brokers import ConfiguredServer

MODULE = "tests.support.small_service"


class SmallSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the tests change."""

    mode: str = "consume"
    """consume, fail, refuse, finish, ignore-stop or block."""
    trigger: str = ""
    """Block the event loop once this file is there."""
    block_s: float = 0.0
    """For so long; 0: for ever."""
    hold_lock: bool = False
    """Block all threads, with Python's interpreter lock held, for ever."""


async def main(context: Context[SmallSettings]) -> None:
    settings = context.settings
    match settings.mode:
        case "fail":
            raise RuntimeError("made to fail")
        case "refuse":
            raise StartError("made to refuse: use another mode")
        case "ignore-stop":
            await asyncio.Event().wait()
        case "block":
            while not Path(settings.trigger).exists():  # noqa: ASYNC110, ASYNC240 - the test has no other way in
                await asyncio.sleep(0.01)
            if settings.hold_lock:
                hold_interpreter_lock()
            sit_still(settings.block_s)
            context.count("awake_again")
            await asyncio.Event().wait()
        case "consume":
            async with context.bus.consume("FEED", ["dynamix.v1.state.>"], start="all") as consumer:
                async for batch in consumer:
                    for message in batch:
                        context.count("states_seen")
                        await context.bus.publish_bytes_soon(
                            "dynamix.v1.window.job.1.node-a", message.payload, f"window:{message.sequence}"
                        )
            context.log.info("intake ended", stop=context.stop.is_set())


def sit_still(seconds: float) -> None:
    """What must be named in the stack."""
    if seconds:
        time.sleep(seconds)
    else:
        threading.Event().wait()


def hold_interpreter_lock() -> None:
    """What must be named in the stack, too."""
    ctypes.PyDLL(None).pause()


@contextlib.asynccontextmanager
async def service_process(
    server: ConfiguredServer, *arguments: str, module: str = MODULE, **environ: str
) -> AsyncIterator[Process]:
    """Run a service as node-a, its stderr in a pipe, and kill it at the end of the block if it still runs."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *arguments),
        cwd=Path(__file__).parents[2],
        env={**os.environ, **bus_environment(server.settings), "DYNAMIX_NODE": "node-a", **environ},
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


if __name__ == "__main__":
    sys.exit(run("collector", SmallSettings, main))
