"""What is published for a job whose session was not closed."""

import asyncio
import gc
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.brokers import ConfiguredServer
from tests.support.bus_watch import stored_job
from tests.support.ranks import run_ranks
from tests.support.training import Numbered, begin_job, train_step
from torch.distributed.elastic.multiprocessing import SignalException

from dynamix.cli.services import bus_environment
from dynamix.runtime.bus import Bus
from dynamix.trainer import Session
from dynamix.trainer.steering.run import reason_after


@pytest.mark.parametrize(
    ("error", "may_restart", "reason"),
    [
        (None, True, "left"),
        (SystemExit(0), True, "left"),
        (SystemExit(3), True, None),
        (ValueError("no such file"), True, None),
        (ValueError("no such file"), False, "ValueError: no such file"),
        (KeyboardInterrupt(), True, "KeyboardInterrupt"),
        (SignalException("process 7 got signal: 15", sigval=15), True, "SignalException: process 7 got signal: 15"),  # type: ignore[arg-type]  # torch passes a number, too
    ],
)
def test_only_an_error_that_a_launcher_answers_is_no_end(
    error: BaseException | None, may_restart: bool, reason: str | None
) -> None:
    assert reason_after(error, may_restart=may_restart) == reason


def _train() -> tuple[Session, Callable[[Any], list[int]]]:
    """A session, and what takes a step of it."""
    session, model, optimizer = begin_job(Numbered(1000, torch.float32), local_batch_size=4, connect=None)
    return session, partial(train_step, session, model, optimizer)


def _leave(_rank: int) -> None:
    session, step = _train()
    for _ in session.epochs(3):
        for batch in session.loader:
            step(batch)
            break
        break
    del session, step, batch
    gc.collect()


async def test_a_session_that_is_let_go_of_ends_its_job(server: ConfiguredServer, bus: Bus) -> None:
    await asyncio.to_thread(run_ranks, _leave, 1, environ=bus_environment(server.settings) | {"DYNAMIX_JOB": "let-go"})
    job = await stored_job(bus, "let-go")
    assert (job.phase, job.end_reason) == ("ended", "left")


@pytest.mark.slow
async def test_a_script_that_somebody_interrupts_ends_its_job_although_restarts_are_left(
    server: ConfiguredServer, bus: Bus, tmp_path: Path
) -> None:
    environ = {
        **os.environ,
        **bus_environment(server.settings),
        "DYNAMIX_JOB": "stopped",
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "TORCHELASTIC_RUN_ID": "run-1",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, str(tmp_path / "store"), env=environ, stderr=asyncio.subprocess.PIPE
    )
    _, shown = await process.communicate()
    assert b"KeyboardInterrupt" in shown
    job = await stored_job(bus, "stopped")
    assert (job.phase, job.end_reason) == ("ended", "KeyboardInterrupt")


def main(store: str) -> None:
    """A script without a `with`, stopped by Ctrl-C in its third step."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    session, step = _train()
    for _ in session.epochs(3):
        for batch in session.loader:
            if session.step_index == 2:
                os.kill(os.getpid(), 2)
            step(batch)


if __name__ == "__main__":
    main(sys.argv[1])
