"""What README lists as working beside a plain DDP script: each trains as one big batch does on one process."""

import contextlib
import warnings
from typing import Any

import torch
from tests.support.loops import gathered
from tests.support.ranks import each_case, run_ranks
from tests.support.training import Numbered, distribute, make_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler

from dynamix.trainer import attach

DATA = Numbered(150)
SHARDED = ("FSDP", "FSDP2", "HSDP")
CASES = (*SHARDED, "checkpointing", "static_graph", "GradScaler", "clipping", "LBFGS", "ZeRO-1")


def _model(case: str) -> Any:
    model = make_model()
    if case == "FSDP":
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    if case in SHARDED:
        shape, names = ((2, 2), ("replicas", "shards")) if case == "HSDP" else ((4,), ("shards",))
        return fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    return DistributedDataParallel(model, static_graph=True) if case == "static_graph" else distribute(model)


def _parameters(model: nn.Module) -> torch.Tensor:
    whole = isinstance(model, FullyShardedDataParallel)
    with FullyShardedDataParallel.summon_full_params(model) if whole else contextlib.nullcontext():
        parts = [each.detach() for each in model.parameters()]
        return torch.cat([getattr(each, "full_tensor", each.clone)().flatten() for each in parts])


def _optimizer(case: str, parameters: Any) -> Any:
    if case == "LBFGS":
        return torch.optim.LBFGS(parameters, lr=0.05, max_iter=2)
    if case == "ZeRO-1":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what it imports is deprecated
            from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: PLC0415

        return ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1)
    return torch.optim.SGD(parameters, lr=0.1)


def _difference(_rank: int, case: str) -> float:
    """The largest difference of parameters after an epoch of unequal batches."""
    model, alone = _model(case), make_model()
    optimizer = _optimizer(case, model.parameters())
    reference = _optimizer("LBFGS" if case == "LBFGS" else "", alone.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=case == "GradScaler")
    plain: DataLoader[Any] = DataLoader(DATA, 12, sampler=DistributedSampler(DATA))
    session, loader = attach(
        *(model, optimizer, plain), local_batch_size=(5, 19, 7, 17), policy="static", connect=False
    )
    for inputs, targets, indices in loader:

        def closure(inputs: Any = inputs, targets: Any = targets) -> torch.Tensor:
            optimizer.zero_grad()
            outputs = checkpoint(model, inputs, use_reentrant=False) if case == "checkpointing" else model(inputs)
            loss = nn.functional.cross_entropy(outputs, targets)
            scaler.scale(session.scale_loss(loss)).backward()
            return loss

        used = gathered(indices[: session.num_samples].tolist())

        def whole(used: list[int] = used) -> torch.Tensor:
            reference.zero_grad()
            loss = nn.functional.cross_entropy(alone(DATA.inputs[used].double()), DATA.targets[used])
            loss.backward()
            if case == "clipping":
                nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
            return loss

        if case == "LBFGS":
            optimizer.step(closure)
            reference.step(whole)
            continue
        closure()
        if case == "clipping":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        whole()
        reference.step()
    session.close()
    return float((_parameters(model) - _parameters(alone)).abs().max())


def test_what_is_listed_as_working_trains_as_one_big_batch() -> None:
    found = run_ranks(each_case, 4, _difference, [(case,) for case in CASES])[0]
    assert {case: error for case, error in zip(CASES, found, strict=True) if error > 1e-12} == {}
