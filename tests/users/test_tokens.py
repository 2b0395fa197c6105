"""Padded sequences, weighted by the tokens that count; and losses that are no mean over the samples."""

from collections import Counter
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tests.support.loops import gathered, gradient_of, relative_error
from tests.support.ranks import run_ranks
from tests.support.training import (
    NUM_CLASSES,
    NUM_FEATURES,
    Numbered,
    begin_job,
    distribute,
    kept_messages,
    make_model,
    offer,
)
from torch import nn
from torch.utils.data import Dataset

from dynamix.schemas.messages import Message, Report
from dynamix.trainer.data.plan import Counts, divide_tokens, largest_remainder

IGNORED = -100

Sequence = tuple[torch.Tensor, torch.Tensor, int]


class Sequences(Dataset[Sequence]):
    """Sequences of 1 to 12 tokens, of which some count; every seventh has none that does."""

    def __init__(self, num_samples: int) -> None:
        generator = torch.Generator().manual_seed(3)
        lengths = torch.randint(1, 13, (num_samples,), generator=generator).tolist()
        self.inputs = [torch.randn(n, NUM_FEATURES, generator=generator, dtype=torch.float64) for n in lengths]
        self.targets = [torch.randint(0, NUM_CLASSES, (n,), generator=generator) for n in lengths]
        for index, targets in enumerate(self.targets):
            targets[torch.rand(len(targets), generator=generator) < 0.3] = IGNORED
            if index % 7 == 3:
                targets[:] = IGNORED
        self.counted = [int((targets != IGNORED).sum()) for targets in self.targets]

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Sequence:
        return self.inputs[index], self.targets[index], index


def pad(samples: list[Sequence]) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """A batch as long as its longest sequence."""
    inputs = nn.utils.rnn.pad_sequence([each[0] for each in samples], batch_first=True)
    targets = nn.utils.rnn.pad_sequence([each[1] for each in samples], batch_first=True, padding_value=IGNORED)
    return inputs, targets, [each[2] for each in samples]


def count_targets(batch: Any) -> torch.Tensor:
    return (batch[1] != IGNORED).sum()


def _loss(model: nn.Module, batch: Any, reduction: str = "mean") -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction=reduction)


def _error(model: nn.Module, data: Sequences, used: list[int], reduction: str, factor: float) -> float:
    """The largest relative error against the gradient of one big batch; absolute where no token counts."""
    alone = make_model()
    _loss(alone, pad([data[index] for index in used]), reduction).backward()
    whole = gradient_of(alone) * factor
    return float((gradient_of(model) - whole).abs().max() / (whole.abs().max() or 1.0))


KINDS: dict[str, dict[str, Any]] = {
    "tokens of each sample": {"token_counts": True},
    "tokens of each sample, micro-batches": {"token_counts": True, "micro_batch_size": 14},
    "tokens of each sample, scaled loss": {"token_counts": True, "weighting": "loss"},
    "tokens of each sample, scaled loss, micro-batches": {
        "token_counts": True, "weighting": "loss", "micro_batch_size": 14,
    },
    "tokens of each sample, accumulation steps": {"token_counts": True, "gradient_accumulation_steps": 3},
    "counted in batches, accumulation steps": {"count_tokens": count_targets, "gradient_accumulation_steps": 3},
    "tokens of each sample, sum": {"token_counts": True, "reduction": "sum"},
    "counted in batches": {"count_tokens": count_targets},
    "counted in batches, tracking": {"count_tokens": count_targets, "split": "tracking"},
    "counted in batches, micro-batches": {"count_tokens": count_targets, "micro_batch_size": 3},
    "counted in batches, scaled loss": {"count_tokens": count_targets, "weighting": "loss"},
    "counted in batches, sum": {"count_tokens": count_targets, "reduction": "sum"},
    "sized by one, weighed by the other": {"token_counts": "length", "count_tokens": count_targets},
}  # fmt: skip


def _compare(_rank: int, options: dict[str, Any]) -> dict[str, Any]:
    """An epoch under changing sizes: the error of every step's gradient, and what each rank had in it."""
    data = Sequences(160)
    split, by = options.pop("split", "fixed"), options.pop("token_counts", None)
    reduction = options.get("reduction", "mean")
    sizes = [(3, 9), (12, 1), (0, 5), (1, 1), (4, 4)]
    if by:
        counts = data.counted if by is True else [len(targets) for targets in data.targets]
        options["token_counts"] = counts
        sizes = [(14, 50), (60, 13), (0, 40), (12, 12), (30, 30)]
    session, model, optimizer = begin_job(
        data, rate=0.0, local_batch_size=sizes[0], window_steps=1, collate_fn=pad, **options
    )
    errors, samples, excess, micro, used = [], [], [0], 0, []
    for batch in session.loader:
        current = session.loader.current
        assert current is not None
        mine = batch[2][: session.num_samples]
        loss = _loss(model, batch, reduction) / options.get("gradient_accumulation_steps", 1)
        (session.scale_loss(loss) if "weighting" in options else loss).backward()
        micro += 1
        used += mine
        if "token_counts" in options:
            tokens = sum(options["token_counts"][index] for index in mine)
            excess.append(tokens - options.get("micro_batch_size", 999))
            assert tokens == current.size
        if session.sync_gradients:
            if "token_counts" in options:
                tokens = sum(options["token_counts"][index] for index in used)
                largest = max(session.local_batch_sizes) == session.local_batch_sizes[torch.distributed.get_rank()]
                excess.append(tokens - max(session.local_batch_sizes[torch.distributed.get_rank()], 12 * largest))
            everything = gathered(used)
            # plain DDP divides a sum by the ranks; the batch that the script was written for is that of `sizes[0]`
            factor = sum(sizes[0]) / current.plan.counts.total / 2 if reduction == "sum" else 1.0
            errors.append(_error(model, data, everything, reduction, factor))
            samples += everything
            optimizer.step()
            optimizer.zero_grad()
            offer(session, sizes[(session.step_index + 1) % len(sizes)], split=split)
            used = []
        session.step(loss)
    session.close()
    return {"error": max(errors), "samples": samples, "excess": max(excess), "micro": micro, "steps": len(errors)}


def _compare_all(rank: int) -> dict[str, dict[str, Any]]:
    return {name: _compare(rank, dict(options)) for name, options in KINDS.items()}


def test_the_gradient_is_that_of_one_big_batch_over_all_tokens_that_count() -> None:
    for results in run_ranks(_compare_all, 2):
        for name, result in results.items():
            assert result["error"] < 1e-12, name
            assert Counter(result["samples"]) == Counter(range(160)), name
            assert result["excess"] <= 0, name  # no batch is larger than its size, in tokens
            assert (result["micro"] > result["steps"]) == ("micro" in name or "steps" in name), name


@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=60).filter(any),
    st.lists(st.integers(0, 30), min_size=1, max_size=4).filter(any),
)
def test_whole_samples_are_divided_without_gap_overlap_or_excess(tokens: list[int], sizes: list[int]) -> None:
    ends, offset, position = np.cumsum(tokens), 0, 0
    while offset < ends[-1]:
        left = min(int(ends[-1]) - offset, sum(sizes))
        starts, found = divide_tokens(ends, offset, Counts(largest_remainder(left, sizes)), Counts(sizes))
        assert starts[0] == position
        assert found.values == tuple(sum(tokens[a:b]) for a, b in pairwise(starts))
        if any(has > size for has, size in zip(found.values, sizes, strict=True)):
            assert found.num_active == 1  # a sample that is longer than every size, alone
            assert max(sizes) < found.total <= 12
        assert found.total > 0
        offset, position = offset + found.total, starts[-1]
    assert position == len(tokens)


# --- the rest of a session ---------------------------------------------------------------------------------------


def _by_length(_epoch: int) -> list[int]:
    """Sequences of like lengths side by side, as scripts order them to save padding."""
    lengths = [len(each) for each in Sequences(160).targets]
    return sorted(range(160), key=lambda index: lengths[index] // 4 * 1000 + index % 13)


def _epochs(_rank: int) -> dict[str, Any]:
    """Two epochs by tokens in an order by length, then the same again from a state in the middle of the first."""
    data, found = Sequences(160), {}
    state: dict[str, Any] = {}
    for name in ("whole", "resumed"):
        options: dict[str, Any] = {"window_steps": 5, "collate_fn": pad, "global_batch": "fixed"}
        options |= {"local_batch_size": 30, "token_counts": data.counted, "sampler": _by_length}
        session, model, optimizer = begin_job(data, **options)
        reports: list[Message] = []
        session._transport.publish = reports.append  # type: ignore[method-assign]
        if state:
            session.load_state_dict(state)
        used, lengths = [], []
        for _ in session.epochs(2):
            lengths.append(len(session.loader))
            for batch in session.loader:
                optimizer.zero_grad()
                loss = _loss(model, batch)
                loss.backward()
                optimizer.step()
                used.append(batch[2][: session.num_samples])
                correct = (model(batch[0]).argmax(-1) == batch[1]).sum()
                session.step(loss, num_correct=correct)
                if name == "whole" and session.step_index == 4:
                    state = session.state_dict()
        session.close()
        rows = [row for report in reports if isinstance(report, Report) for row in report.rows]
        found[name] = {
            "used": used, "lengths": lengths, "position": session.position, "progress": session.progress,
            "steps": session.num_reference_steps, "tokens": sum(row.num_samples for row in rows),
            "correct": all(row.num_correct is None or 0 <= row.num_correct <= row.num_samples for row in rows),
        }  # fmt: skip
    return found


def test_batches_by_tokens_count_resume_and_report_in_tokens() -> None:
    total = sum(Sequences(160).counted)
    results = run_ranks(_epochs, 2)
    for result in results:
        whole, resumed = result["whole"], result["resumed"]
        assert whole["used"][4:] == resumed["used"]
        assert sum(whole["lengths"]) == len(whole["used"])
        assert whole["position"] == resumed["position"] == 2 * total
        assert whole["steps"] == -(-total // 60)
        assert whole["progress"] == 2 * whole["steps"]
        assert whole["correct"]
    everything = [i for result in results for batch in result["whole"]["used"] for i in batch]
    assert Counter(everything) == Counter(dict.fromkeys(range(160), 2))
    assert 0 < results[0]["whole"]["tokens"] <= 2 * total


def _refusals(_rank: int) -> None:
    data, model = Sequences(20), distribute(make_model())

    def refused(text: str, **options: Any) -> None:
        with pytest.raises(ValueError, match=text):
            begin_job(data, model, local_batch_size=30, global_batch="fixed", **options)

    refused("19 numbers for 20 samples", token_counts=data.counted[1:])
    refused("one whole number per sample", token_counts=[0] * 20)
    refused("one whole number per sample", token_counts=[0.5] * 20)
    refused("a sample has 100 tokens, but a batch at most 60 .* sizes are in tokens", token_counts=[100] * 20)
    refused(
        "micro-batches must be known before the first one, pass token_counts",
        count_tokens=count_targets, micro_batch_size=2, weighting="loss",
    )  # fmt: skip


def test_token_counts_that_cannot_work_are_refused_with_the_fix() -> None:
    run_ranks(_refusals, 2)


# --- losses that are no mean over the samples: found in the first steps, exact when written as told ---

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
