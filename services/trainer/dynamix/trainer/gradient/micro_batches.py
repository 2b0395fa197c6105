"""Steps of several backward passes, whose gradients are added up.

Torch adds up the gradients g_j of micro-batches in `Parameter.grad`. With a mean loss they must count by their samples
or tokens, sum_j m_j g_j, so what was added up is scaled by m_j / m_(j+1) where the next one has another weight: one
pass over the gradients, with samples at most once per step, since sizes differ by one. The whole is then in the scale
of the last micro-batch, with which gradients are exchanged (`hook`). Ranks may have different numbers of them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from dynamix.trainer.data.plan import MicroBatch
from dynamix.trainer.gradient.hook import Reduction, StepWeights
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
    """Whether every forward pass is a collective, so that all ranks need equally many: sharding, SyncBatchNorm."""
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
