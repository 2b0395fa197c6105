"""Sharded models: two nodes of two ranks train as one big batch does, whatever the sizes, the codec and the period."""

from typing import Any

import torch
from tests.support.loops import gathered, relative_error, whole_gradient
from tests.support.ranks import each_case, run_ranks
from tests.support.training import Numbered, begin_job, make_model, offer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

SIZES = [(9, 40, 3, 12), (2, 0, 31, 5), (0, 0, 20, 1), (16, 16, 16, 16)]
LAYOUTS = ("all ranks", "two dimensions", "nodes")


def sharded(layout: str, dtype: torch.dtype = torch.float64) -> Any:
    """A model over all ranks, or with a copy on each node that FSDP2 sums itself, or that the session sums."""
    model = make_model(dtype)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "shard"))
    meshes = {"all ranks": init_device_mesh("cpu", (4,)), "two dimensions": mesh, "nodes": mesh["shard"]}
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=meshes[layout])
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
    times = session.times
    assert times is not None and times.compute_s > 0
    session.close()
    return max(errors)


def test_the_gradient_is_that_of_one_big_batch() -> None:
    options: list[dict[str, Any]] = [{}, {"micro_batch_size": 8}, {"count_tokens": lambda batch: len(batch[1])}]
    cases = [(layout, each) for layout in LAYOUTS for each in (*options, {"reduction": "sum"})]
    found = run_ranks(each_case, 4, _errors, cases)
    assert max(max(errors) for errors in found) < 1e-12
