"""The steady job under torchrun, seen through the log of its ranks."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tests.support.control_plane import ControlPlane

SCRIPT = Path(__file__).with_name("steady_job.py")
JOB = "steady-00c0ffee"


class TrainingJob:
    """The running job, seen through the log of its ranks."""

    def __init__(self, directory: Path, process: asyncio.subprocess.Process) -> None:
        self.directory = directory
        self.process = process

    def steps(self, rank: int = 0) -> list[dict[str, Any]]:
        """Every step a rank has logged, whole lines only."""
        path = self.directory / f"rank-{rank}.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    async def wait_for_steps(self, count: int) -> None:
        """Wait until rank 0 has done `count` steps in all."""
        async with asyncio.timeout(180):
            while len(self.steps()) < count:
                assert self.process.returncode is None, "the job has ended"
                await asyncio.sleep(0.05)

    def stop_after_epoch(self) -> None:
        """Let the job end by itself."""
        (self.directory / "stop").touch()

    async def more_steps(self, count: int) -> None:
        """Wait until the job has done `count` further steps: it is training now."""
        await self.wait_for_steps(len(self.steps()) + count)


@contextlib.asynccontextmanager
async def training(plane: ControlPlane, directory: Path, num_epochs: int) -> AsyncIterator[TrainingJob]:
    """Two ranks under torchrun, which restarts them at most twice."""
    environ = {
        **os.environ,
        **plane.environ,
        "DYNAMIX_JOB": JOB,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "--max-restarts=2",
        "--monitor-interval=0.2",
    ]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, str(SCRIPT), str(directory), str(num_epochs), env=environ
    )
    try:
        yield TrainingJob(directory, process)
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
