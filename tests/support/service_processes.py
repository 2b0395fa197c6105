"""A service as a process of its own, connected to a test's broker."""

import asyncio
import contextlib
import os
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from pathlib import Path

from dynamix.cli.services import bus_environment

from .brokers import ConfiguredServer

ROOT = Path(__file__).parents[2]


@contextlib.asynccontextmanager
async def service_process(
    server: ConfiguredServer, module: str, *arguments: str, **environ: str
) -> AsyncIterator[Process]:
    """Run `python -m MODULE` as node-a, its stderr in a pipe, and kill it at the end of the block if it still runs."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *arguments),
        cwd=ROOT,
        env={**os.environ, **bus_environment(server.settings), "DYNAMIX_NODE": "node-a", **environ},
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()
