"""Sharded models: two nodes of two ranks train as one big batch does, whatever the sizes, the codec and the period."""

import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.support.loops import gathered, relative_error, whole_gradient
from tests.support.ranks import each_case, run_ranks
from tests.support.training import (
    Numbered,
    begin_job,
    distribute,
    flat_parameters,
    gather,
    make_model,
    offer,
    train_step,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dynamix import trainer as dynamix
from dynamix.schemas.messages.allocation import Exchange

SIZES = [(9, 40, 3, 12), (2, 0, 31, 5), (0, 0, 20, 1), (16, 16, 16, 16)]
SHARES = (1.0, 0.0, 3.0, 2.0)
LAYOUTS = ("all ranks", "two dimensions", "nodes")


@cache
def _meshes() -> dict[str, Any]:
    """Made once in a process: one more would give groups that a second session makes other names."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "shard"))
    return {"all ranks": init_device_mesh("cpu", (4,)), "two dimensions": mesh, "nodes": mesh["shard"]}


def sharded(layout: str, dtype: torch.dtype = torch.float64) -> Any:
    """A model over all ranks, or with a copy on each node that FSDP2 sums itself, or that the session sums."""
    model = make_model(dtype)
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=_meshes()[layout])
    return model


def _errors(_rank: int, layout: str, options: dict[str, Any]) -> float:
    """The largest error of the gradient against that of one big batch, in steps of moving sizes."""
    data, errors = Numbered(300), []
    model = sharded(layout)
    session, _, optimizer = begin_job(
        data, model, rate=0.0, local_batch_size=SIZES[0], window_steps=1, max_lag_windows=9, **options
    )
    used: list[int] = []
    for inputs, targets, indices in session.loader:
        used += indices[: session.num_samples].tolist()
        loss = nn.functional.cross_entropy(model(inputs), targets, reduction=options.get("reduction", "mean"))
        loss.backward()
        if session.sync_gradients:
            found = torch.cat([each.grad.full_tensor().flatten() for each in model.parameters()])
            whole = whole_gradient(data, gathered(used))
            if "reduction" in options:  # as large as with a batch of the script, 64 of 4 ranks
                whole *= 64 / 4
            errors.append(relative_error(found, whole))
            used = []
            optimizer.step()
            optimizer.zero_grad()
            offer(session, SIZES[(session.step_index + 1) % len(SIZES)])
        session.step(loss)
    session.close()
    return max(errors)


def test_the_gradient_is_that_of_one_big_batch() -> None:
    options: list[dict[str, Any]] = [{}, {"micro_batch_size": 8}, {"count_tokens": lambda batch: len(batch[1])}]
    cases = [(layout, each) for layout in LAYOUTS for each in (*options, {"reduction": "sum"})]
    found = run_ranks(each_case, 4, _errors, cases)
    assert max(max(errors) for errors in found) < 1e-12


class Reference:
    """Both nodes in one process: each steps on what its ranks have, and they are averaged where the session says so."""

    def __init__(self, data: Numbered, rate: float) -> None:
        self._data, self._num_samples = data, [0, 0]
        self.models = [make_model() for _ in range(2)]
        self._optimizers = [torch.optim.SGD(each.parameters(), lr=rate, momentum=0.9) for each in self.models]

    def step(self, used: list[list[int]], *, is_local: bool, is_averaged: bool, leaves: bool) -> None:
        """One step with these samples by rank; `leaves`: whether local steps end with it."""
        for node, (model, optimizer) in enumerate(zip(self.models, self._optimizers, strict=True)):
            mine = used[2 * node] + used[2 * node + 1] if is_local else [each for part in used for each in part]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(self._data.inputs[mine]), self._data.targets[mine]).backward()
            optimizer.step()
            self._num_samples[node] += len(used[2 * node] + used[2 * node + 1])
        if is_averaged:
            weights = [number / sum(self._num_samples) for number in self._num_samples]
            for parts in zip(*(each.parameters() for each in self.models), strict=True):
                states = [
                    each.state[part]["momentum_buffer"] for each, part in zip(self._optimizers, parts, strict=True)
                ]
                for tensors in ([part.data for part in parts], states if leaves else []):
                    mean = sum(weight * each for weight, each in zip(weights, tensors, strict=False))
                    for each in tensors:
                        each.copy_(mean)
            self._num_samples = [0, 0]


def _levers(rank: int, exchanges: dict[int, Exchange], num_steps: int) -> dict[str, Any]:
    """The largest error of the parameters where nodes are averaged, while sizes move; exchanges are offered by step."""
    data, model = Numbered(3000), sharded("nodes")
    session, _, optimizer = begin_job(
        *(data, model),
        local_batch_size=SIZES[0],
        window_steps=1,
        max_lag_windows=9,
        exchange="local",
        noise_every=1,
        learning_rate_rule="none",
    )
    reference, errors, labels = Reference(data, 0.05), [], set()
    for inputs, targets, indices in session.loader:
        used = gather(indices[: session.num_samples].tolist())
        step, exchange = session.step_index, session.allocation.exchange
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        offered = exchanges[max(each for each in exchanges if each <= step)]
        offer(session, SIZES[step % len(SIZES)], exchange=offered)
        session.step()
        leaves = session.allocation.exchange.every == 1
        reference.step(used, is_local=exchange.every > 1, is_averaged=session.is_averaged, leaves=leaves)
        whole = torch.cat([each.full_tensor().detach().flatten() for each in model.parameters()])
        if session.is_averaged:
            assert len({each.numpy().tobytes() for each in gather(whole)}) == 1, (step, exchange.label)
            errors.append(relative_error(whole, flat_parameters(reference.models[rank // 2])))
        labels.add(exchange.label)
        if session.step_index == num_steps:
            break
    session.average()
    session.close()
    return {"error": max(errors), "labels": labels}


def test_nodes_have_the_same_parameters_after_every_averaging() -> None:
    exact = {0: Exchange(), 10: Exchange(every=4), 30: Exchange(), 40: Exchange(every=3, route="shares", shares=SHARES)}
    lossy = {0: Exchange(codec="int8"), 12: Exchange(codec="bf16", every=2), 30: Exchange(codec="int8", route="shares")}
    found = run_ranks(each_case, 4, _levers, [(exact, 60), (lossy, 45)])
    for first, second in found:
        assert first["error"] < 1e-12
        assert second["error"] < 0.05
        assert len(first["labels"]) == 3
        assert len(second["labels"]) == 4


def _resumed(rank: int, layout: str, directory: str, first: int, last: int) -> torch.Tensor:
    """Parameters after the steps `first` to `last`, with checkpoints before and behind them."""
    data, model = Numbered(900, torch.float32), sharded(layout, torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    own = Path(directory) / f"session{rank}.pt"
    if first:
        parts = get_state_dict(model, optimizer)
        dcp.load(dict(zip(("model", "optimizer"), parts, strict=True)), checkpoint_id=directory)
        set_state_dict(model, optimizer, model_state_dict=parts[0], optim_state_dict=parts[1])
    exchange = Exchange(codec="int8") if layout == "nodes" else "exact"
    session, model, optimizer = begin_job(
        *(data, model), optimizer=optimizer, local_batch_size=SIZES[0], exchange=exchange
    )
    if first:
        session.load_state_dict(torch.load(own, weights_only=True))
    time.sleep(0.2 * (rank == 0))  # the others must not look for it where the session before this one was
    for batch in session.loader:
        train_step(session, model, optimizer, batch)
        if session.step_index == last:
            break
    parts = get_state_dict(model, optimizer)
    dcp.save(dict(zip(("model", "optimizer"), parts, strict=True)), checkpoint_id=directory)
    torch.save(session.state_dict(), own)
    session.close()
    return torch.cat([each.full_tensor().detach().flatten() for each in model.parameters()])


def test_a_run_resumed_from_a_distributed_checkpoint_goes_on_bit_by_bit(tmp_path: Path) -> None:
    directory = str(tmp_path)
    for layout in ("all ranks", "nodes"):
        cases = [(layout, directory, *steps) for steps in ((0, 12), (0, 5), (5, 12))]
        for straight, half, resumed in run_ranks(each_case, 4, _resumed, cases):
            assert torch.equal(straight, resumed), layout
            assert not torch.equal(straight, half)


def _refused(_rank: int) -> None:
    data = Numbered(64)
    for layout in ("all ranks", "two dimensions"):
        with pytest.raises(ValueError, match=r"exchange='lossy': FSDP2 sends these gradients itself; .* mesh=mesh\["):
            begin_job(data, sharded(layout), exchange="lossy")
    taken, second = sharded("nodes"), sharded("nodes")
    taken_optimizer = torch.optim.SGD(taken.parameters(), lr=0.1)
    taken.set_all_reduce_hook(lambda _: None)
    with pytest.raises(RuntimeError, match="all-reduce hook already"):
        begin_job(data, taken)
    with pytest.raises(ValueError, match="base_hook is for DistributedDataParallel"):
        begin_job(data, second, base_hook=lambda *_: None)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "shard"))["shard"]
    other = fully_shard(nn.Linear(6, 4 + dist.get_rank() // 2), mesh=mesh)
    with pytest.raises(ValueError, match="not copies of one model"):
        begin_job(data, other)
    with pytest.raises(ValueError, match="a copy on each node and others exclude each other"):
        dynamix.attach([distribute(make_model()), second], taken_optimizer, data, local_batch_size=8, connect=False)
    session, model, optimizer = begin_job(data, sharded("nodes"))
    for batch in session.loader:
        with pytest.raises(RuntimeError, match="a second sharded model is trained"):
            second(batch[0])
        train_step(session, model, optimizer, batch)
    late = sharded("nodes")
    late(batch[0]).sum().backward()
    with pytest.raises(RuntimeError, match="a second sharded model is trained"):
        torch.optim.SGD(late.parameters(), lr=0.1).step()
    session.close()


def test_what_cannot_be_weighed_or_sent_is_refused_with_the_reason() -> None:
    run_ranks(_refused, 4)
