"""Out of memory without a restart: the step is computed again in halves, while the other ranks wait.

A backward pass under DDP exchanges buckets as it goes; once one is under way, nothing can be taken back. So a batch
that is larger than any before it is computed without exchanging, and its gradients are exchanged at the end, bucket by
bucket as the other ranks' are (`GradientHook.exchange`). If it does not fit, the gradients are put back as they were,
and it is computed in parts of half the size, and so on. Parts of a size that fits are exchanged with the last one as
usual. It costs overlap, once per new largest size.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from dynamix.trainer.data.plan import MicroBatch

from .models import set_gradient_sync
from .weighting import GradientHook, Reduction

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
        """Whether gradients can be exchanged without DDP's backward pass, and nothing was added up before."""
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
