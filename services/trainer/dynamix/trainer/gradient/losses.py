"""Losses that are not a mean over the rank's samples: found in the first steps, and warned about in rank 0.

Ranks are weighed by their samples. With unequal batches the gradient is then another one than that of one big batch
where the loss is weighted by class, contains what a collective brought from other ranks, or changes with the size of
the batch, as a sum or negatives taken from the batch do. Nothing is called or changed to find out: it shows in the
autograd graph, in the process group's count of collectives, and in the losses that the ranks report anyway.
"""

import contextlib
import logging
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist
from torch._C import _distributed_c10d as c10d

MAX_NODES = 100
"""Nodes of the autograd graph that are looked at, from the loss on."""
MIN_SIZE_RATIO = 1.25
MIN_WINDOWS = 8
"""With three, one job in twenty whose loss differs much between ranks by chance would be warned falsely."""
MAX_WINDOWS = 20
"""The most windows that are looked at, of those whose largest batch is so many times the smallest."""

WEIGHTED = (torch.nn.CrossEntropyLoss, torch.nn.NLLLoss)
"""Criteria whose mean may be weighted by class."""
EQUAL_SIZES = 'keep all batches equal by attach(policy="static"), and drop_last=True there or in the DataLoader'

_log = logging.getLogger("dynamix.trainer")


@dataclass(kw_only=True)
class LossWarnings:
    """Looks at the losses of a job whose ranks may have unequal batches."""

    is_sum: bool
    weighs_samples: bool
    """As the script has set it, like `is_sum`."""
    is_joint: bool
    """Whether the forward pass of the model has collectives of its own."""
    has_equal_data: bool
    """Whether only the sizes of the ranks' batches tell their losses apart."""
    is_in_parts: bool
    """Whether a step has batches of about one size."""

    def __post_init__(self) -> None:
        """Begin with everything to look for."""
        self._may_be_weighted = self.weighs_samples and not self.is_sum
        self._may_be_joint = self._may_be_weighted and not self.is_joint
        self.hides_slow_ranks = False
        """Whether ranks were seen to wait for each other in the forward pass, which counts as computing."""
        self._group: dist.ProcessGroup | None = None
        """That of the model whose forward pass has begun, until its gradient comes."""
        self._num_before = 0
        """Collectives of that group before the forward pass, and DDP's own in it."""
        self._slopes = [0.0] * MAX_WINDOWS if self.is_in_parts else []
        """Slope of log loss over log size, by window: 0 for a mean, 1 for a sum."""

    def look_at_modules(self, models: Iterable[torch.nn.Module]) -> None:
        """Warn of SyncBatchNorm, and of a class weight in a criterion, which may be a part of a model."""
        modules = [each for model in models for each in model.modules()]
        if any(isinstance(each, torch.nn.SyncBatchNorm) for each in modules):
            _log.warning(
                "SyncBatchNorm adds up gradients of all ranks before they are weighed, so unequal batches change the "
                "gradient: pass attach(weighting='loss') and call session.scale_loss(loss).backward(), or %s",
                EQUAL_SIZES,
            )
        for module in modules:
            if isinstance(module, WEIGHTED) and module.reduction == "mean":
                self._note_weight(is_weighted=module.weight is not None)

    def look_at_loss(self, loss: object) -> None:
        """Warn of a class weight in the first loss, by the nodes of its graph, which may have been freed."""
        if not self._may_be_weighted:
            return
        nodes = [getattr(loss, "grad_fn", None)]
        for node in nodes:
            if node is None:
                continue
            if node.name().startswith("NllLoss") and node._saved_reduction == 1:  # noqa: SLF001 - the mean
                try:
                    self._note_weight(is_weighted=node._saved_weight is not None)  # noqa: SLF001
                except RuntimeError:  # there was one, which backward() has freed
                    self._note_weight(is_weighted=True)
            if len(nodes) < MAX_NODES:
                nodes += [each for each, _ in node.next_functions]
        self._may_be_weighted = False

    def _note_weight(self, *, is_weighted: bool) -> None:
        if is_weighted and self._may_be_weighted:
            self._may_be_weighted = False
            _log.warning(
                "the loss is a mean weighted by class (weight=...), but ranks are weighed by their samples, so unequal "
                "batches change the gradient: pass attach(count_tokens=lambda batch: ...), the class weights of the "
                "batch's targets added up, as a whole number (times 1000, for example)"
            )

    def begin_step(self) -> None:
        """Begin a step, with its last batch."""
        self._group = None

    def forward_begins(self, model: Any) -> None:
        """Note how many collectives there were, and how many DDP is about to add."""
        if not self._may_be_joint:
            return
        if self._group is None:
            with contextlib.suppress(RuntimeError):  # of a back end that does not count
                self._num_before = _num_collectives(model.process_group)
                self._group = model.process_group
        if model.will_sync_module_buffers():
            broadcasts = c10d._compute_bucket_assignment_by_size(  # noqa: SLF001 - as DDP does
                model.modules_buffers, [model.broadcast_bucket_size]
            )
            self._num_before += len(broadcasts[0])

    def gradient_begins(self) -> None:
        """Warn of collectives since the forward pass began, with the job's first gradient.

        No size has changed by then. In the forward pass after it DDP makes its buckets again, by collectives.
        """
        group, self._group = self._group, None
        number = 0 if group is None else _num_collectives(group) - self._num_before
        self._may_be_joint = False
        if number > 0:
            self.hides_slow_ranks = True
            _log.warning(
                "collectives ran (%d) between the beginning of the forward pass and backward(): ranks wait in them, "
                "which hides a slow rank; and if the loss depends on them, unequal batches change the gradient: divide "
                "the loss by a count of this rank alone and pass that as attach(count_tokens=...), or, with features "
                "of other ranks, %s",
                number,
                EQUAL_SIZES,
            )

    def observe_window(
        self, sizes: Sequence[float], loss_sums: Sequence[float | None], squares: Sequence[float]
    ) -> None:
        """Warn of losses that change with the size b of the batch, by those of a window's ranks and by their samples.

        Where the script reports no loss, the gradients tell a sum from a mean: |g| goes with b^-0.5 to b^0 for a mean,
        by how much of it is noise, and with b^0.5 to b^1 for a sum. `squares` are sums of b |g|^2.
        """
        if len(self._slopes) >= MAX_WINDOWS or not 0 < MIN_SIZE_RATIO * min(sizes) <= max(sizes):
            return
        is_reported = None not in loss_sums
        if is_reported:
            losses = [(loss_sum or 0.0) / size for loss_sum, size in zip(loss_sums, sizes, strict=True)]
        else:
            losses = [math.sqrt(square / size) * size**0.25 for square, size in zip(squares, sizes, strict=True)]
        if not all(loss > 0 for loss in losses):  # or unknown
            return
        slope = statistics.linear_regression([math.log(size) for size in sizes], [math.log(loss) for loss in losses])[0]
        self._slopes.append(-slope if self.is_sum else slope)
        if len(self._slopes) < MIN_WINDOWS:
            return
        mean, error = statistics.fmean(self._slopes), statistics.stdev(self._slopes) / math.sqrt(len(self._slopes))
        if mean - 3 * error > 0.5:
            self._warn_of_size(
                "does not grow with its batch, as a sum over samples would: leave reduction='sum' out"
                if self.is_sum
                else "grows in proportion to its batch, as a sum does, but is weighed as a mean: pass "
                "attach(reduction='sum')"
            )
        elif is_reported and self.has_equal_data and not self.is_sum and 0.5 > mean > 0.1 + 5 * error:
            self._warn_of_size(
                "grows with its batch, as with negatives taken from the batch, so unequal batches change the "
                f"gradient: {EQUAL_SIZES}"
            )

    def _warn_of_size(self, what: str) -> None:
        _log.warning("the loss of a rank %s", what)
        self._slopes = [0.0] * MAX_WINDOWS  # once


def _num_collectives(group: Any) -> int:
    return int(group._get_sequence_number_for_group())  # noqa: SLF001 - no public name
