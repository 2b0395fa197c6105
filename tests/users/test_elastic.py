"""Jobs of torchrun's agent: one node killed for good while it trains, and a rank killed once."""

import json
import os
import runpy
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.support import steady_job
from tests.support.http_get import free_port
from tests.support.steady_training import start_agent

NUM_EPOCHS = 1

KILLED_ONCE = """
import os, signal, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from dynamix.trainer import attach

is_first, rank = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0", int(os.environ["RANK"])
if rank == 0 and not is_first:
    time.sleep(3)  # rank 1 looks for rank 0 before rank 0 has published where it is
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = attach(model, optimizer, torch.ones(64, 4), local_batch_size=4, connect=False)
for step, inputs in enumerate(session.loader):
    if rank == 1 and is_first and step == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    loss = model(inputs).square().mean()
    loss.backward()
    optimizer.step()
    session.step(loss)
session.close()
dist.destroy_process_group()
"""


@contextmanager
def _agent(directory: Path, port: int) -> Iterator[Any]:
    """An agent with one rank."""
    options = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=elastic"]
    options += [f"--rdzv-endpoint=127.0.0.1:{port}"]
    options += ["--rdzv-conf=last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"]
    environ = {"DYNAMIX_JOB": "elastic-0a1b2c3d", "DYNAMIX_NATS_URL": "nats://127.0.0.1:9"}
    agent = start_agent(options, environ, steady_job.main, directory, NUM_EPOCHS)
    try:
        yield agent
    finally:
        children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children")
        pids = [int(pid) for pid in children.read_text().split()] if children.exists() else []
        for pid in (agent.pid, *pids):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        agent.join()


def _wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "waited too long"
        time.sleep(0.1)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _steps(directory: Path) -> list[dict[str, Any]]:
    lines = (line for path in directory.glob("rank-*.jsonl") for line in path.read_text().splitlines())
    return [json.loads(line) for line in lines if line.endswith("}")]


@pytest.mark.slow
def test_a_job_goes_on_with_the_ranks_that_are_left_at_the_same_global_batch(tmp_path: Path) -> None:
    port = free_port()
    with _agent(tmp_path, port) as first:
        _wait_until(lambda: _listens(port), 240)  # the agent that is killed must not be the one that holds the store
        with _agent(tmp_path, port):
            _wait_until(lambda: any(len(s["sizes"]) == 2 and s["step"] >= 25 for s in _steps(tmp_path)), 240)
        first.join(120)
        assert first.exitcode == 0
    steps = _steps(tmp_path)
    assert {sum(step["sizes"]) for step in steps} == {32}
    alone = [step for step in steps if len(step["sizes"]) == 1]
    assert alone[0]["sizes"] == [32]
    resumed_at = alone[0]["step"]
    kept = [step for step in steps if step in alone or step["step"] < resumed_at]
    used = Counter(index for step in kept for index in step["indices"])
    assert used == Counter(range(steady_job.NUM_SAMPLES))
    assert {step["generation"] for step in alone} != {step["generation"] for step in steps if step not in alone}


@pytest.mark.slow
def test_restarted_ranks_of_plain_torchrun_find_each_other(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(KILLED_ONCE)
    options = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--nproc-per-node=2", "--max-restarts=1"]
    agent = start_agent(options, {}, runpy.run_path, str(script), None, "__main__")
    agent.join(120)
    assert agent.exitcode == 0
