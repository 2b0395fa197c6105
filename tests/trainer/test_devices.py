"""The trainer on a device: what is marked `gpu` runs where there is one (`make gpu`), the same on the CPU anywhere.

Ranks share the one device, over gloo; NCCL wants a device per rank, so it has one rank.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.loops import SIZES, train_compared
from tests.support.ranks import run_ranks
from tests.support.training import Numbered, begin_job, distribute, make_model, offer, train_step
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dynamix import trainer as dynamix
from dynamix.schemas.messages.allocation import Exchange
from dynamix.trainer import Session

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
ON_GPU = [pytest.param("cuda", marks=GPU)]
DEVICES = ["cpu", *ON_GPU]
OPTIONS: dict[str, Any] = {
    "rate": 0.0, "local_batch_size": (9, 40), "window_steps": 4, "noise_every": 1, "policy": None,
    "pin_memory": torch.cuda.is_available(),
}  # fmt: skip


def _attach(
    device: str, data: Numbered, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[Session, nn.Module, torch.optim.Optimizer]:
    return begin_job(data, distribute(make_model(dtype).to(device)), **OPTIONS | options)


def _batches(session: Session, device: str) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Copied to the device without waiting, as a script does from pinned memory."""
    for inputs, targets, indices in session.loader:
        yield inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True), indices


def _weigh(_rank: int, device: str, dtype: torch.dtype, options: dict[str, Any]) -> dict[str, Any]:
    """An epoch of changing sizes: errors against one big batch, number of samples, and metrics."""
    data = Numbered(600, torch.float64 if dtype == torch.float64 else torch.float32)
    session, model, optimizer = _attach(device, data, dtype, **options)
    errors = []
    for error in train_compared(session, model, optimizer, data):
        errors.append(error)
        offer(session, SIZES[(session.step_index + 1) % len(SIZES)])
    session.close()
    return {"error": max(errors), "samples": session.position, "metrics": session.metrics()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-4), (torch.bfloat16, 0.2), (torch.float16, 0.1)]
)
def test_the_gradient_is_that_of_one_big_batch(device: str, dtype: torch.dtype, tolerance: float) -> None:
    options = {"num_workers": 1} if dtype == torch.float64 else {}
    for result in run_ranks(_weigh, 2, device, dtype, options):
        assert result["error"] < tolerance
        assert result["samples"] == 600


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("codec", "tolerance"), [("none", 1e-4), ("rows", 1e-4), ("int8", 0.1)])
def test_gradients_travel_through_the_memory_of_the_host(device: str, codec: str, tolerance: float) -> None:
    options = {"exchange": Exchange(codec=codec, route="shares", shares=(1.0, 2.0))}
    for result in run_ranks(_weigh, 2, device, torch.float32, options):
        assert result["error"] < tolerance
        assert result["samples"] == 600


def _local(_rank: int, device: str) -> list[tuple[bool, torch.Tensor]]:
    """Whether the ranks are averaged after each step, their parameters and buffers; Adam's state in the end."""
    layers = nn.Sequential(make_model(torch.float32), nn.BatchNorm1d(4)).to(device)
    model = DistributedDataParallel(layers, bucket_cap_mb=0.001)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    session = dynamix.attach(
        model, optimizer, Numbered(600, torch.float32), local_batch_size=(9, 40), min_local_batch_size=2,
        window_steps=4, noise_every=1, connect=False, global_batch="adaptive", pin_memory=OPTIONS["pin_memory"],
        exchange=Exchange(every=3, codec="bf16"),
    )  # fmt: skip
    found = []
    for batch in _batches(session, device):
        train_step(session, model, optimizer, batch)
        state = [each.detach().flatten().float().cpu() for each in (*model.parameters(), *model.buffers())]
        found.append((session.is_averaged, torch.cat(state)))
    moments = [optimizer.state[each]["exp_avg_sq"].flatten().cpu() for each in model.parameters()]
    session.close()
    return [*found, (True, torch.cat(moments))]


@pytest.mark.parametrize("device", DEVICES)
def test_local_steps_end_alike_on_a_device(device: str) -> None:
    first, second = run_ranks(_local, 2, device)
    assert [averaged for averaged, _ in first[:7]] == [False, False, True, False, False, True, False]
    assert first[-2][0], "the epoch's last step ends a round"
    for (averaged, mine), (_, other) in zip(first, second, strict=True):
        assert torch.equal(mine, other) == averaged


@pytest.mark.parametrize("device", ON_GPU)
def test_norms_and_losses_stay_on_the_device_until_the_window_ends_and_come_out_alike(device: str) -> None:
    here, there = (run_ranks(_weigh, 2, each, torch.float64, {})[0]["metrics"] for each in ("cpu", device))
    assert len(here) == len(there) > 1
    for ours, theirs in zip(here, there, strict=True):
        for name in ("loss", "noise_scale", "samples_seen"):
            assert theirs[name] == pytest.approx(ours[name], rel=1e-6)
    assert there[0]["device_memory_bytes/rank_0"] > 0


def _compute(rank: int, device: str) -> dict[str, Any]:
    """Rank 1 computes eight times as much per sample: the times that rank 0 knows, and the sizes at the end."""
    session, model, optimizer = _attach(
        device, Numbered(12_000, torch.float32), torch.float32, local_batch_size=64, window_steps=10,
        global_batch="fixed", min_local_batch_size=1,
    )  # fmt: skip
    width = 1024 if device == "cuda" else 64
    work = torch.randn(128, width, width, device=device)
    for inputs, targets, _ in _batches(session, device):
        load = work[: len(inputs)]
        for _ in range(8 if rank == 1 else 1):
            load = torch.bmm(load, load).tanh()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets) + 0.0 * load.sum()
        loss.backward()
        optimizer.step()
        session.step(loss)
        if session.step_index == 40:
            break
    times = session.times
    session.close()
    return {"compute_s": 0.0 if times is None else times.compute_s, "sizes": session.local_batch_sizes}


@pytest.mark.parametrize("device", DEVICES)
def test_a_rank_with_more_to_compute_gets_fewer_samples(device: str) -> None:
    """On a device by its events: a host that runs ahead is not a fast one."""
    for result in run_ranks(_compute, 2, device):
        assert result["compute_s"] > 0
        assert result["sizes"][1] < 0.8 * result["sizes"][0]
        assert sum(result["sizes"]) == 128


def _compiled(_rank: int, device: str, backend: str) -> float:
    data = Numbered(300, torch.float32)
    model: nn.Module = torch.compile(DistributedDataParallel(make_model(torch.float32).to(device)), backend=backend)
    session, _, optimizer = begin_job(data, model, **OPTIONS)
    with session:
        return max(train_compared(session, model, optimizer, data))


@pytest.mark.parametrize(("device", "backend"), [("cpu", "eager"), pytest.param("cuda", "inductor", marks=GPU)])
def test_a_compiled_model_is_weighed(device: str, backend: str) -> None:
    assert max(run_ranks(_compiled, 2, device, backend)) < 1e-3


def _alone_over(_rank: int, backend: str, device: str) -> tuple[float, int]:
    """One rank over another backend, with tracking: the hook's whole path, and the steps done."""
    group = dist.new_group([0], backend=backend)
    model = DistributedDataParallel(make_model().to(device), process_group=group)
    data, options = Numbered(200), {"local_batch_size": 25, "weighting": "hook", "global_batch": "fixed"}
    session, _, optimizer = begin_job(data, model, rate=0.0, policy=None, **options)
    with session:
        return max(train_compared(session, model, optimizer, data)), session.step_index


@pytest.mark.parametrize(
    ("backend", "device"),
    [("gloo", "cpu"), pytest.param("nccl", "cuda", marks=GPU)],
)
def test_one_rank_trains_over_its_backend(backend: str, device: str) -> None:
    ((error, num_steps),) = run_ranks(_alone_over, 1, backend, device)
    assert error < 1e-12
    assert num_steps == 8
