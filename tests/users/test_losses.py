"""Losses that are not a mean over the rank's samples: found in the first steps, and exact when written as told."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from tests.support.loops import gathered, gradient_of, relative_error
from tests.support.ranks import run_ranks
from tests.support.training import Numbered, begin_job, distribute, kept_messages, make_model
from torch import nn

SIZES = (53, 11)
CLASS_WEIGHT = torch.tensor([0.1, 5.0, 1.0, 2.0], dtype=torch.float64)
NUM_BOXES = torch.tensor([1, 9, 2, 4])
"""Objects in a sample, by its class."""


def _each(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def _mean(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return _each(outputs, targets).mean()


def _over_constant(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return _each(outputs, targets).sum() / 32


def _weighted(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return 2 * nn.functional.cross_entropy(outputs, targets, CLASS_WEIGHT)


def _per_box(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (_each(outputs, targets) * NUM_BOXES[targets]).sum() / NUM_BOXES[targets].sum()


def _per_box_of_all_ranks(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """As DETR has it: each rank's sum over the mean count of all ranks."""
    num_boxes = NUM_BOXES[targets].sum().double()
    dist.all_reduce(num_boxes)
    boxes_per_rank = num_boxes / dist.get_world_size()
    return (_each(outputs, targets) * NUM_BOXES[targets]).sum() / boxes_per_rank


def _contrastive(outputs: torch.Tensor, _targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


def _count_weights(batch: Any) -> torch.Tensor:
    return (1000 * CLASS_WEIGHT[batch[1]]).sum().round()


def _count_boxes(batch: Any) -> torch.Tensor:
    return NUM_BOXES[batch[1]].sum()


Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class _Case(NamedTuple):
    loss: Loss
    whole: Loss | None
    """The same loss of one big batch, where there is one."""
    options: Mapping[str, Any]
    is_exact: bool
    warning: str = ""
    """What the first warning names as the remedy."""


CASES = {
    "mean": _Case(_mean, _mean, {}, is_exact=True),
    "sum over a constant": _Case(_over_constant, _over_constant, {}, is_exact=False, warning="reduction='sum'"),
    "declared sum": _Case(_over_constant, _over_constant, {"reduction": "sum"}, is_exact=True),
    "falsely declared sum": _Case(_mean, _mean, {"reduction": "sum"}, is_exact=False, warning="reduction='sum'"),
    "class weights": _Case(_weighted, _weighted, {}, is_exact=False, warning="count_tokens"),
    "counted class weights": _Case(_weighted, _weighted, {"count_tokens": _count_weights}, is_exact=True),
    "count of all ranks": _Case(_per_box_of_all_ranks, _per_box, {}, is_exact=False, warning="count_tokens"),
    "declared sum over it": _Case(_per_box_of_all_ranks, _per_box, {"reduction": "sum"}, is_exact=True),
    "own count": _Case(_per_box, _per_box, {"count_tokens": _count_boxes}, is_exact=True),
    "negatives of the batch": _Case(_contrastive, None, {}, is_exact=False, warning='policy="static"'),
}


def _model() -> nn.Module:
    """With buffers of two types, which DDP broadcasts in each forward pass."""
    model = make_model()
    for name, dtype in (("seen", torch.int64), ("shift", torch.float64)):
        model.register_buffer(name, torch.zeros(3, dtype=dtype))
    return model


def _train(_rank: int, name: str) -> tuple[float, list[str], bool]:
    """The largest error of a gradient against that of one big batch, the warnings, and if a gain is estimated."""
    case, messages, data = CASES[name], kept_messages(), Numbered(64 * 14)
    options = {"local_batch_size": SIZES, "window_steps": 1, "global_batch": "fixed", **case.options}
    session, model, optimizer = begin_job(data, distribute(_model()), rate=0.0, **options)
    errors = [0.0]
    for batch in session.loader:
        optimizer.zero_grad()
        loss = case.loss(model(batch[0]), batch[1])
        loss.backward()
        if case.whole is not None:
            alone, used = make_model(), gathered(batch[2].tolist())
            case.whole(alone(data.inputs[used]), data.targets[used]).backward()
            scale = 0.5 if case.whole is _over_constant else 1.0  # DDP's average over two ranks
            errors.append(relative_error(gradient_of(model), scale * gradient_of(alone)))
        optimizer.step()
        session.step(loss)
    summary = session.summary()
    session.close()
    return max(errors), messages, summary is not None and summary.equal_sizes_s is not None


@pytest.mark.parametrize("name", CASES)
def test_a_loss_that_unequal_batches_would_weigh_wrong_is_warned_about_and_exact_as_told(name: str) -> None:
    case = CASES[name]
    (error, warnings, is_estimated), (_, of_rank_1, _) = run_ranks(_train, 2, name)
    assert of_rank_1 == []
    assert is_estimated == (case is not CASES["count of all ranks"])  # where ranks wait, a slow one is not seen
    if case.whole is not None:
        assert (error < 1e-12) == case.is_exact
    assert bool(warnings) == bool(case.warning)
    assert case.warning in "".join(warnings[:1])
