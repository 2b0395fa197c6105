"""Jobs under torchrun's agent, forked like its ranks from this process; and the steady job, seen through its log."""

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch.distributed import run

from . import steady_job
from .control_plane import ControlPlane
from .ranks import START, begin_fork

JOB = "steady-00c0ffee"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def start_agent(options: list[str], environ: Mapping[str, str], main: Callable[..., Any], *arguments: Any) -> Any:
    """An agent with these options of torchrun, whose ranks call `main(*arguments)`; its process."""
    agent = START.Process(target=_agent, args=(options, {**ENVIRONMENT, **environ}, main, arguments))
    agent.start()
    return agent


def _agent(
    options: list[str], environ: Mapping[str, str], main: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    begin_fork(environ)
    config, _, _ = run.config_from_args(run.parse_args([*options, "--start-method=fork", "script"]))
    run.elastic_launch(config, _rank)(main, *arguments)


def _rank(main: Callable[..., Any], *arguments: Any) -> None:
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):  # a script does not have the agent's handlers
        signal.signal(number, signal.SIG_DFL)
    main(*arguments)


class TrainingJob:
    """The running job, seen through the log of its ranks."""

    def __init__(self, directory: Path, agent: BaseProcess) -> None:
        self.directory = directory
        self._agent = agent

    def steps(self, rank: int = 0) -> list[dict[str, Any]]:
        """Every step a rank has logged, whole lines only."""
        path = self.directory / f"rank-{rank}.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    async def wait_for_steps(self, count: int) -> None:
        """Wait until rank 0 has done `count` steps in all."""
        async with asyncio.timeout(180):
            while len(self.steps()) < count:
                assert self._agent.is_alive(), "the job has ended"
                await asyncio.sleep(0.05)

    def stop_after_epoch(self) -> None:
        """Let the job end by itself."""
        (self.directory / "stop").touch()

    async def more_steps(self, count: int) -> None:
        """Wait until the job has done `count` further steps: it is training now."""
        await self.wait_for_steps(len(self.steps()) + count)

    async def ended(self) -> int | None:
        """The exit code, once it has ended."""
        await asyncio.to_thread(self._agent.join)
        return self._agent.exitcode


@contextlib.asynccontextmanager
async def training(plane: ControlPlane, directory: Path, num_epochs: int) -> AsyncIterator[TrainingJob]:
    """Two ranks, which the agent restarts at most twice."""
    options = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--nproc-per-node=2", "--max-restarts=2"]
    environ = {**plane.environ, "DYNAMIX_JOB": JOB}
    agent = start_agent([*options, "--monitor-interval=0.2"], environ, steady_job.main, directory, num_epochs)
    try:
        yield TrainingJob(directory, agent)
    finally:
        agent.terminate()
        await asyncio.to_thread(agent.join)
