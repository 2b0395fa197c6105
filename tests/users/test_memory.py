"""A rank that runs out of memory computes its batch in parts."""

from typing import Any

import pytest
import torch
from tests.support.loops import OPTIONS, gathered, gradient_of, relative_error
from tests.support.ranks import run_ranks
from tests.support.training import Numbered, distribute, make_model, offer
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from dynamix import trainer as dynamix


def _out_of_memory(rank: int, place: str, reduction: str, based: bool) -> dict[str, Any]:
    """Rank 1 cannot compute more than 12 samples at once, in the forward or at the end of the backward pass."""
    data = Numbered(600)
    model = distribute(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    session = dynamix.attach(
        model, optimizer, data, global_batch="adaptive", reduction=reduction, noise_every=1,  # type: ignore[arg-type]
        base_hook=default_hooks.allreduce_hook if based else None,
        **OPTIONS | {"local_batch_size": (9, 20)},
    )  # fmt: skip
    largest, errors, losses = [], [], []

    class Limited(torch.autograd.Function):
        @staticmethod
        def forward(_context: Any, value: torch.Tensor, rows: int) -> torch.Tensor:
            _context.rows = rows
            return value.clone()

        @staticmethod
        def backward(context: Any, *gradients: torch.Tensor) -> Any:
            if place == "backward" and rank == 1 and context.rows > 12:
                raise torch.OutOfMemoryError("in the backward pass")
            return gradients[0], None

    def compute(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if place == "forward" and rank == 1 and len(inputs) > 12:
            raise torch.OutOfMemoryError("in the forward pass")
        largest.append(len(inputs))
        hidden = model(Limited.apply(inputs.clone().requires_grad_(), len(inputs)))
        return nn.functional.cross_entropy(hidden, targets, reduction=reduction)

    sizes = [(9, 9), (9, 9), (9, 40), (20, 50), (9, 9), (40, 33)]
    for batch in session.loader:
        used = gathered(batch[2][: session.num_samples].tolist())
        optimizer.zero_grad()
        loss = session.backward(compute, batch[0], batch[1])
        whole = make_model()
        expected = nn.functional.cross_entropy(whole(data.inputs[used]), data.targets[used])
        expected.backward()
        plain_scale = 29 / 2 if reduction == "sum" else 1.0  # of the first global batch under plain DDP
        errors.append(relative_error(gradient_of(model), gradient_of(whole) * plain_scale))
        plain = nn.functional.cross_entropy(make_model()(batch[0]), batch[1], reduction=reduction)
        losses.append(abs(float(loss - plain)))
        optimizer.step()
        offer(session, sizes[(session.step_index + 1) % len(sizes)])
        session.step(loss)
    session.close()
    return {
        "largest": max(largest),
        "error": max(errors),
        "loss": max(losses),
        "numbers": len(largest),
        "steps": len(errors),
    }


@pytest.mark.parametrize(
    ("place", "reduction", "based"), [("forward", "mean", False), ("backward", "sum", False), ("forward", "mean", True)]
)
def test_a_rank_out_of_memory_computes_its_batch_in_parts(place: str, reduction: str, based: bool) -> None:
    results = run_ranks(_out_of_memory, 2, place, reduction, based)
    for result in results:
        assert result["error"] < 1e-12
        assert result["loss"] < 1e-12
    if place == "forward":
        assert results[1]["largest"] <= 12 < results[0]["largest"]
    assert results[1]["numbers"] > results[1]["steps"]
    assert results[0]["numbers"] == results[0]["steps"]
