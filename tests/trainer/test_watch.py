"""`dynamix watch` in the ranks: no bit of a training changes, and times go to the rank and the part that takes them."""

import os
import socket
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from bench.hosts import Hosts, Link
from tests.support.ranks import run_ranks
from tests.support.training import Numbered, flat_parameters, make_model
from tests.support.watched import watched_row
from torch import nn
from torch.distributed import fsdp
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from dynamix.cli.watching import Watched
from dynamix.schemas.watching import Row, Step
from dynamix.trainer.watch import Recorder, Reporter, fold, install

LATE_S = 0.2
SLOW = 1


class Delay(torch.autograd.Function):
    """The identity, late in the backward pass."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class Parts(nn.Module):
    """Some layers, of which every second call leaves one out."""

    def __init__(self, *, has_unused: bool = False, norm: bool = False) -> None:
        super().__init__()
        self.layers = make_model(torch.float32)
        self.norm = nn.BatchNorm1d(6) if norm else nn.Identity()
        self.more = nn.Linear(6, 4)
        self.calls, self.has_unused = 0, has_unused
        self.late_s = 0.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        out = self.layers(Delay.apply(self.norm(inputs).requires_grad_(), self.late_s))
        return out if self.has_unused and self.calls % 2 else out + self.more(inputs)


def _train(
    rank: int,
    *,
    options: dict[str, Any] | None = None,
    hook: Any = None,
    accumulates: bool = False,
    num_steps: int = 6,
    is_late: bool = False,
    model_options: dict[str, Any] | None = None,
    sharded: bool = False,
) -> torch.Tensor:
    torch.manual_seed(3)
    data = Numbered(600, torch.float32)
    parts = Parts(**(model_options or {}))
    parts.late_s = LATE_S if is_late and rank == SLOW else 0.0
    model: Any = fsdp.fully_shard([parts])[0] if sharded else None
    if model is None:
        model = DistributedDataParallel(parts, bucket_cap_mb=0.0005, **(options or {}))
    if hook is not None:
        model.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(data, batch_size=5, sampler=DistributedSampler(data))
    for step, (inputs, targets, _) in enumerate(loader):
        only_adds = accumulates and step % 2 == 0
        with model.no_sync() if only_adds else nullcontext():
            nn.functional.cross_entropy(model(inputs), targets).backward()
        if not only_adds:
            optimizer.step()
            optimizer.zero_grad()
        if step + 1 == num_steps * (2 if accumulates else 1):
            break
    return torch.zeros(0) if sharded else flat_parameters(model)


def waiting_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages, and waits for it, as some hooks do."""
    averaged = allreduce_hook(state, bucket)
    averaged.wait()
    return averaged


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bucket views": {"options": {"gradient_as_bucket_view": True}},
    "unused": {"options": {"find_unused_parameters": True}, "model_options": {"has_unused": True}},
    "static graph": {"options": {"static_graph": True}},
    "buffers": {"model_options": {"norm": True}},
    "hook": {"hook": allreduce_hook},
    "accumulation": {"accumulates": True},
}


def _both(rank: int) -> list[tuple[str, bool, int, float]]:
    plain = {name: _train(rank, **case) for name, case in CASES.items()}
    recorder = Recorder()
    install(recorder)
    found = []
    for name, case in CASES.items():
        watched = _train(rank, **case)
        steps = [fold(marks, recorder.seconds) for marks in recorder.steps]
        found.append((name, torch.equal(plain[name], watched), len(steps), min(step.sync_s for step in steps[1:])))
        recorder.steps.clear()
    return found


def test_a_watched_training_has_the_same_bits_and_is_split_into_its_parts() -> None:
    for found in run_ranks(_both, 3):
        for name, is_equal, num_steps, sync_s in found:
            assert (name, is_equal, num_steps) == (name, True, 6)
            assert sync_s > 0, name


def _steps(rank: int, case: dict[str, Any]) -> list[Step]:
    recorder = Recorder()
    install(recorder)
    _train(rank, num_steps=18, is_late=True, **case)
    return [fold(marks, recorder.seconds) for marks in recorder.steps]


@pytest.mark.parametrize(
    "case",
    [{}, {"model_options": {"norm": True}}, {"sharded": True}, {"hook": waiting_hook}],
    ids=["backward", "with BatchNorm", "FSDP", "hook"],
)
def test_the_time_that_one_rank_takes_longer_attributed_to_it(case: dict[str, Any]) -> None:
    watched, name = Watched(), f"rank {SLOW} compute_s"
    for rank, steps in enumerate(run_ranks(_steps, 3, case)):
        watched.add(watched_row(rank, steps, 3))
    assert watched.windows_named[name][0] == 1
    assert [each.name for each in watched.found if each.name.startswith("rank")] == [name]
    assert watched.found[0].excess_s == pytest.approx(LATE_S, rel=0.2)


NUM_RANKS = 4


def _reported(rank: int, path: str) -> None:
    os.environ["DYNAMIX_NODE"] = f"node-{rank}"
    recorder = Recorder()
    reporter = Reporter(recorder, path)
    install(recorder)
    model = DistributedDataParallel(nn.Linear(500, 500))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(25):
        model(torch.ones(4, 500)).mean().backward()
        optimizer.step()
    reporter.end()


@pytest.mark.bpf
def test_the_rank_behind_a_slow_link_is_named(tmp_path: Path) -> None:
    watched, path = Watched(), str(tmp_path / "rows")
    with Hosts(NUM_RANKS) as hosts, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as rows:
        hosts[2].set_link(Link.parse("20mbit"))
        rows.bind(path)

        def receive() -> None:
            while packet := rows.recv(1 << 20):
                watched.add(msgspec.msgpack.decode(packet, type=Row))

        receiver = threading.Thread(target=receive)
        receiver.start()
        run_ranks(_reported, NUM_RANKS, path, hosts=hosts)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
            last.sendto(b"", path)
        receiver.join()
    assert watched.windows_named["link 2"][0] <= 10
    assert [each.name for each in watched.found] == ["link 2"]
