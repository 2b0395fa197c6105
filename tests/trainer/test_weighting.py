"""The weighted gradient against one big batch, in float64, on four real ranks."""

import copy
import math
from typing import Any

import torch
from tests.support.loops import gradient_of
from tests.support.ranks import each_case, run_ranks
from tests.support.training import Numbered, begin_job, offer
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from dynamix.trainer.data.orders import epoch_order
from dynamix.trainer.gradient.noise import is_measured

NUM_SAMPLES = 1201
SIZES = [
    (32, 32, 32, 32),
    (8, 40, 64, 16),
    (1, 7, 100, 20),
    (5, 0, 3, 2),
    (0, 0, 0, 9),
    (3, 3, 1, 0),
    (90, 60, 30, 150),
]
MODES: list[tuple[str, dict[str, Any]]] = [
    ("mean", {"weighting": "hook"}),
    ("sum", {"weighting": "hook"}),
    ("mean", {"weighting": "hook", "base_hook": allreduce_hook}),
    ("sum", {"weighting": "hook", "base_hook": allreduce_hook}),
    ("mean", {"weighting": "hook", "split": "tracking"}),
    ("sum", {"weighting": "hook", "split": "tracking"}),
    ("mean", {"weighting": "loss"}),
    ("sum", {"weighting": "loss"}),
]


def _gradient(model: nn.Module, data: Numbered, indices: list[int]) -> torch.Tensor:
    """Mean gradient over some samples, in one process."""
    alone = copy.deepcopy(model)
    alone.zero_grad()
    nn.functional.cross_entropy(alone(data.inputs[indices]), data.targets[indices]).backward()
    return gradient_of(alone)


def compare_with_one_batch(rank: int, reduction: str, options: dict[str, Any]) -> dict[str, Any]:
    """Train one epoch under changing sizes; the largest relative errors over its steps, and the counts of each."""
    split = options.pop("split", "fixed")
    data = Numbered(NUM_SAMPLES)
    options |= {"local_batch_size": SIZES[0], "window_steps": 1, "reduction": reduction, "noise_every": 3}
    session, model, optimizer = begin_job(data, **options)
    order = epoch_order(NUM_SAMPLES, 0, 0, shuffle=True).tolist()
    errors, norm_errors, counts = [], [], []
    hook = next(iter(session._models._hooks), None)
    for inputs, targets, _ in session.loader:
        batch = session.loader.current
        assert batch is not None
        plan = batch.plan
        used = order[plan.offset : plan.offset + plan.counts.total]
        mine = used[plan.counts.starts[rank] : plan.counts.starts[rank + 1]]
        loss = nn.functional.cross_entropy(model(inputs), targets, reduction=reduction)
        if hook is not None and not mine:
            loss = loss * math.nan  # a dummy batch may do what it likes
        optimizer.zero_grad()
        (loss if hook is not None else session.scale_loss(loss)).backward()
        mean = _gradient(model.module, data, used)
        # plain DDP divides a sum by the number of ranks, in the batch that the script was written for
        whole = mean * (sum(SIZES[0]) / 4 if reduction == "sum" else 1)
        weighted = gradient_of(model)
        errors.append(float((weighted - whole).abs().max() / whole.abs().max()))
        if hook is not None:
            norms = hook.take_norms()
            if not is_measured(plan.step, 3):
                assert norms == ([], [])
        if hook is not None and is_measured(plan.step, 3):
            assert len(norms.local) == len(norms.reduced) > (plan.step > 0)  # DDP makes its buckets after step 0
            local = float(_gradient(model.module, data, mine).square().sum()) if mine else 0.0
            norm_errors.append(abs(sum(norms.local) - local) / max(local, 1e-30) if mine else sum(norms.local))
            norm_errors.append(abs(sum(norms.reduced) / float(mean.square().sum()) - 1))
        optimizer.step()
        offer(session, SIZES[(plan.step + 1) % len(SIZES)], split=split)
        session.step(loss)
        counts.append(plan.counts.values)
    session.close()
    return {"error": max(errors), "norm_error": max(norm_errors, default=0.0), "counts": counts}


def test_the_weighted_gradient_equals_one_big_batch() -> None:
    for rank, results in enumerate(run_ranks(each_case, 4, compare_with_one_batch, MODES)):
        for (reduction, options), result in zip(MODES, results, strict=True):
            assert result["error"] < 1e-12, (rank, reduction, options)
            assert result["norm_error"] < 1e-10, (rank, reduction, options)
            if "split" in options:
                assert {sum(sizes) for sizes in SIZES} <= {sum(counts) for counts in result["counts"]}
            else:
                assert set(SIZES) <= set(result["counts"])  # unequal, changing and empty batches were all among them
            assert sum(map(sum, result["counts"])) == NUM_SAMPLES
            assert result["counts"][-1] not in SIZES  # and an uneven tail
