"""Steps of several backward passes: micro-batches that are added up, and batches halved where memory ends.

Torch adds up the gradients g_j of micro-batches in `Parameter.grad`. With a mean loss they must count by their samples
or tokens, sum_j m_j g_j, so what was added up is scaled by m_j / m_(j+1) where the next one has another weight: one
pass over the gradients, with samples at most once per step, since sizes differ by one. The whole is then in the scale
of the last micro-batch, with which gradients are exchanged (`hook`). Ranks may have different numbers of them.

A backward pass under DDP exchanges buckets as it goes; once one is under way, nothing can be taken back. So a batch
that is larger than any before it is computed without exchanging, and its gradients are exchanged at the end, bucket by
bucket as the other ranks' are (`GradientHook.exchange`). If it does not fit, the gradients are put back as they were,
and it is computed in parts of half the size, and so on. It costs overlap, once per new largest size.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from dynamix.trainer.data.plan import MicroBatch
from dynamix.trainer.gradient.hook import GradientHook, Reduction, StepWeights
from dynamix.trainer.gradient.models import Averaging, set_gradient_sync


class _Probe(NamedTuple):
    """A parameter and the gradient that it had before the last micro-batch."""

    parameter: torch.nn.Parameter
    gradient: torch.Tensor


class Accumulation:
    """Adds up the gradients of the models of one session."""

    def __init__(
        self, models: Sequence[torch.nn.Module], weights: StepWeights, reduction: Reduction, *, scales_gradients: bool
    ) -> None:
        """`models` may grow; with `scales_gradients` they are weighed here and not by `scale_loss`."""
        self._models = models
        self._weights = weights
        self._reduction = reduction
        self._scales = scales_gradients
        self._probe: _Probe | None = None
        self._only_adds = False

    def begin(self, batch: MicroBatch) -> None:
        """Prepare for a batch: what was added up before it, and whether gradients are exchanged after it.

        Raises:
            RuntimeError: when the gradients of the micro-batches before it are gone.
        """
        self._probe = None
        if self._only_adds == batch.is_last:  # else left alone: a script may have its own reasons for `no_sync`
            self._only_adds = not batch.is_last
            for model in self._models:
                set_gradient_sync(model, exchanged=batch.is_last)
        before = self._weights.begin(batch)
        if before is not None:
            self._rescale(before, self._weights.newest)

    def check_gradients(self) -> None:
        """Make sure, before the update, that no gradient of an earlier micro-batch was dropped.

        Raises:
            RuntimeError: when one was.
        """
        probe, self._probe = self._probe, None
        if probe is not None and probe.parameter.grad is not probe.gradient:
            raise RuntimeError(DROPPED)

    def _rescale(self, before: int, count: int) -> None:
        parameters = [each for model in self._models for each in model.parameters() if each.grad is not None]
        if not parameters:
            raise RuntimeError(DROPPED)
        gradients = [each.grad for each in parameters if each.grad is not None]
        if not any(getattr(model, "gradient_as_bucket_view", False) for model in self._models):
            self._probe = _Probe(parameters[0], gradients[0])
        if not self._scales:
            return
        if before == 0:  # not times zero: a dummy batch may have made it NaN
            torch._foreach_zero_(gradients)
        elif self._reduction == "mean" and before != count:
            torch._foreach_mul_(gradients, before / count)


DROPPED = (
    "the gradients of this step's earlier micro-batches are gone: call optimizer.zero_grad() only where "
    "session.sync_gradients is true, after optimizer.step()"
)


def needs_equal_steps(models: Sequence[torch.nn.Module]) -> bool:
    """Whether forward passes are collectives, so that all ranks need the same number: sharding, SyncBatchNorm."""
    return any(
        isinstance(module, torch.nn.SyncBatchNorm) or not isinstance(model, DistributedDataParallel)
        for model in models
        for module in model.modules()
    )


def check_accumulation(averaging: Averaging, models: Sequence[torch.nn.Module], *, counts_in_batches: bool) -> None:
    """Raise ValueError where gradients of micro-batches cannot be added up, saying how to fix it."""
    if any(getattr(model, "static_graph", False) for model in models):
        raise ValueError(
            "gradient accumulation and DistributedDataParallel(static_graph=True) exclude each other, as under plain "
            "DDP: leave static_graph out"
        )
    if counts_in_batches and averaging != "hook":
        raise ValueError(
            "count_tokens with gradient accumulation needs a DistributedDataParallel model: elsewhere the tokens of "
            "all micro-batches must be known before the first one, pass token_counts"
        )


_log = logging.getLogger("dynamix.trainer")

OUT_OF_MEMORY = (torch.OutOfMemoryError, MemoryError)

ComputeLoss = Callable[..., torch.Tensor]


class HalvedBackward:
    """Forward and backward pass of one DDP model, in parts where the whole does not fit into memory."""

    def __init__(self, model: DistributedDataParallel, hook: GradientHook, reduction: Reduction) -> None:
        self._model = model
        self._hook = hook
        self._reduction = reduction
        self._largest = 0
        """Rows of the largest batch that was computed in one piece."""
        self._limit: int | None = None
        """Most rows that fit, once more did not."""

    def __call__(self, batch: MicroBatch, compute_loss: ComputeLoss, inputs: tuple[Any, ...]) -> torch.Tensor:
        """Compute the loss of a step's only batch and its gradient; returns the loss, detached.

        Raises:
            torch.OutOfMemoryError: when a single row does not fit, or nothing can be computed again.
        """
        rows = _num_rows(inputs)
        if self._limit is not None and rows > self._limit:
            return self._in_parts(compute_loss, inputs, rows, self._limit)
        if rows <= self._largest or not self._can_repeat(batch):
            loss = compute_loss(*inputs)
            loss.backward()  # type: ignore[no-untyped-call]
            self._largest = max(self._largest, rows)
            return loss.detach()
        return self._until_it_fits(compute_loss, inputs, rows)

    def _can_repeat(self, batch: MicroBatch) -> bool:
        """Whether gradients can be exchanged without DDP's backward pass, and none were accumulated before."""
        model = self._model
        return batch.is_first and not (model.find_unused_parameters or getattr(model, "static_graph", False))

    def _until_it_fits(self, compute_loss: ComputeLoss, inputs: tuple[Any, ...], rows: int) -> torch.Tensor:
        part = rows
        before = [None if each.grad is None else each.grad.clone() for each in self._model.parameters()]
        set_gradient_sync(self._model, exchanged=False)
        try:
            while True:
                try:
                    loss = self._add_up(compute_loss, inputs, rows, part)
                    break
                except OUT_OF_MEMORY:
                    if part == 1:
                        raise
                self._put_back(before)
                part = -(-part // 2)
        finally:
            set_gradient_sync(self._model, exchanged=True)
            self._model.require_forward_param_sync = True
        self._largest = max(self._largest, part)
        if part < rows:
            self._limit = part
            _log.warning(
                "out of memory with %d samples: the step was computed again in batches of %d, and so will be all that "
                "are larger",
                rows,
                part,
            )
        self._hook.exchange(self._model)
        return loss

    def _in_parts(self, compute_loss: ComputeLoss, inputs: tuple[Any, ...], rows: int, part: int) -> torch.Tensor:
        """Parts that fit: added up, and exchanged with the last."""
        whole = (rows - 1) // part * part
        set_gradient_sync(self._model, exchanged=False)
        try:
            first = self._add_up(compute_loss, _rows_of(inputs, 0, whole), rows, part)
        finally:
            set_gradient_sync(self._model, exchanged=True)
        return first + self._add_up(compute_loss, _rows_of(inputs, whole, rows), rows, part)

    def _add_up(self, compute_loss: ComputeLoss, inputs: tuple[Any, ...], rows: int, part: int) -> torch.Tensor:
        """Add the gradients of parts of `inputs` up, each by its share of `rows`; returns their loss."""
        total: torch.Tensor | None = None
        for size, piece in _pieces(inputs, part):
            share = size / rows if self._reduction == "mean" else 1.0
            loss = compute_loss(*piece) * share
            loss.backward()  # type: ignore[no-untyped-call]
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None, "a batch has at least one row"
        return total

    def _put_back(self, before: list[torch.Tensor | None]) -> None:
        for parameter, gradient in zip(self._model.parameters(), before, strict=True):
            if gradient is None or parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.copy_(gradient)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _num_rows(inputs: tuple[Any, ...]) -> int:
    """Samples in a batch: the length of its first tensor.

    Raises:
        TypeError: when it has none.
    """
    for leaf in pytree.tree_leaves(inputs):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            return len(leaf)
    raise TypeError("session.backward needs the batch as tensors whose first dimension is the samples")


def _pieces(inputs: tuple[Any, ...], part: int) -> Iterator[tuple[int, tuple[Any, ...]]]:
    rows = _num_rows(inputs)
    for start in range(0, rows, part):
        stop = min(start + part, rows)
        yield stop - start, _rows_of(inputs, start, stop)


def _rows_of(inputs: tuple[Any, ...], start: int, stop: int) -> tuple[Any, ...]:
    """The rows of every tensor that has as many as the batch; everything else as it is."""
    rows = _num_rows(inputs)

    def cut(leaf: Any) -> Any:
        is_batched = isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and len(leaf) == rows
        return leaf[start:stop] if is_batched else leaf

    cut_inputs: tuple[Any, ...] = pytree.tree_map(cut, inputs)
    return cut_inputs
