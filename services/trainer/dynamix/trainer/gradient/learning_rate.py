"""Learning rate: what a changed global batch does to it, to its schedule and to the updates of the optimizers."""

import logging
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.hooks import RemovableHandle

from dynamix.trainer.data.loader import Loader

Rule = Literal["none", "linear", "sqrt"]

FACTORS: dict[Rule, Callable[[float], float]] = {
    "none": lambda ratio: 1.0,  # noqa: ARG005 - every rule takes the ratio
    "linear": lambda ratio: ratio,
    "sqrt": math.sqrt,
}
"""Factor on the learning rate, from the scheduled global batch size over the one the user's rate was chosen for."""


def scale_every_step(
    optimizer: torch.optim.Optimizer, factor: Callable[[], float]
) -> tuple[RemovableHandle, RemovableHandle]:
    """Scale the learning rates for the length of each step; the handles' `remove` leaves the optimizer as it was."""
    saved: list[float | torch.Tensor] = []

    def restore(stepped: torch.optim.Optimizer, *_: Any) -> None:
        for group, rate in zip(stepped.param_groups, saved, strict=False):
            if isinstance(rate, torch.Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate
        saved.clear()

    def scale(stepping: torch.optim.Optimizer, *_: Any) -> None:
        restore(stepping)  # where the last step raised
        if (by := factor()) == 1.0:
            return
        for group in stepping.param_groups:
            rate = group["lr"]
            if isinstance(rate, torch.Tensor):
                saved.append(rate.clone())
                rate.mul_(by)  # in place: captured graphs hold on to it
            else:
                saved.append(rate)
                group["lr"] = rate * by

    return optimizer.register_step_pre_hook(scale), optimizer.register_step_post_hook(restore)


def correct_second_moments(
    optimizer: torch.optim.Optimizer, share: Callable[[], float | torch.Tensor]
) -> tuple[RemovableHandle, RemovableHandle]:
    """Keep Adam's second moments those of all ranks' samples in steps that a rank makes alone.

    The mean of b_i samples has B / b_i times the noise of the mean of all B, by which v would grow, and steps would
    shrink by up to sqrt(B / b_i). With the `share` w = b_i / B and the unbiased first moment m, which has little noise:

        v <- beta2 v + (1 - beta2) (w g^2 + (1 - w) m^2)

    A share of 1 changes nothing. Applies to optimizers whose state has exp_avg, exp_avg_sq and step.
    """
    kept: list[tuple[dict[str, Any], tuple[float, float], torch.Tensor]] = []

    def keep(stepping: torch.optim.Optimizer, *_: Any) -> None:
        kept.clear()  # where the last step raised
        if not isinstance(by := share(), torch.Tensor) and by == 1.0:
            return
        for group in stepping.param_groups:
            for parameter in group["params"]:
                gradient, state = parameter.grad, stepping.state.get(parameter, {})  # empty before the first step
                is_whole = gradient is not None and not gradient.is_sparse  # SparseAdam leaves other rows alone
                if is_whole and {"exp_avg", "exp_avg_sq", "step"} <= state.keys():
                    kept.append((state, group["betas"], state["exp_avg_sq"].clone()))

    def correct(*_: Any) -> None:
        for state, (beta1, beta2), before in kept:  # v itself is v before and g^2, whatever the step did to g
            num_steps = torch.as_tensor(state["step"]).clamp(min=1)  # 0 where a GradScaler skipped all so far
            mean = state["exp_avg"] / (1 - beta1**num_steps)
            state["exp_avg_sq"].lerp_(before.mul_(beta2).add_(mean.square_(), alpha=1 - beta2), 1.0 - share())
        kept.clear()

    return optimizer.register_step_pre_hook(keep), optimizer.register_step_post_hook(correct)


_log = logging.getLogger("dynamix.trainer")

MAX_UNSCHEDULED_CHANGES = 2
"""Changes of a learning rate in the middle of epochs, or of a scheduler that the session drives, without a warning."""


class Schedulers:
    """Schedulers of the user that advance by reference steps (`data.plan.ReferenceSteps`)."""

    def __init__(self) -> None:
        self._left_at: dict[LRScheduler, int] = {}
        """The count of each after it was advanced."""
        self._num_done = 0
        self._num_foreign = 0
        """Advances before which the script had moved a scheduler."""

    def __bool__(self) -> bool:
        return bool(self._left_at)

    def add(self, scheduler: LRScheduler, reference_steps: float) -> None:
        """Advance this one too, from where the run stands. Raises TypeError when it does not count steps."""
        if isinstance(scheduler, ReduceLROnPlateau) or not isinstance(scheduler, LRScheduler):
            raise TypeError(
                f"session.schedule takes a torch.optim.lr_scheduler.LRScheduler that counts steps: call the step "
                f"method of a {type(scheduler).__name__} yourself"
            )
        if not self._left_at:
            self.begin(reference_steps)
        self._left_at[scheduler] = _count(scheduler)

    def begin(self, reference_steps: float) -> None:
        """Count from here on: the schedulers stand where the run stands."""
        self._num_done = math.floor(reference_steps)

    def advance(self, reference_steps: float) -> None:
        """Step them for every whole reference step that has been completed."""
        due = math.floor(reference_steps)
        if due <= self._num_done:
            return
        if any(_count(scheduler) != left_at for scheduler, left_at in self._left_at.items()):
            self._num_foreign += 1  # once when its state is loaded
            if self._num_foreign == MAX_UNSCHEDULED_CHANGES + 1:
                _log.warning(
                    "the script calls scheduler.step() beside session.schedule(scheduler), so that the learning rate "
                    "moves too fast: remove its call"
                )
        for scheduler in self._left_at:
            for _ in range(due - self._num_done):
                scheduler.step()
            self._left_at[scheduler] = _count(scheduler)
        self._num_done = due

    def drives(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a scheduler sets the learning rate of an optimizer."""
        return any(scheduler.optimizer is optimizer for scheduler in self._left_at)


def _count(scheduler: LRScheduler) -> int:
    return getattr(scheduler, "last_epoch", 0)  # a ChainedScheduler has none


MAX_IDLE_STEPS = 20
"""Steps without any update, from the first one on, until the session's optimizers count as not the script's."""

_covered: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""Optimizers of all sessions of this process, whose steps come from no checkpoint."""


@dataclass(kw_only=True, eq=False)
class Updates:
    """The optimizers of one session."""

    loader: Loader
    """Has the batch to train on."""
    prepare: Callable[[], None]
    """Called before each update."""
    factor: Callable[[int], float]
    """Factor on the learning rate, by the global batch size."""
    warns: bool
    """Whether this is the rank that warns."""
    schedulers: Schedulers | None
    """Where steps differ in length, for a warning of rates that others schedule by steps."""

    def __post_init__(self) -> None:
        """Begin without an optimizer."""
        self._seen: dict[int, tuple[int, list[Any]]] = {}
        """The epoch and the learning rates of each optimizer's newest update."""
        self._num_changes = 0
        self._factor = 1.0
        self.share = 1.0
        """The share of a step's samples behind this rank's gradient: 1 except in local steps."""
        self._num_idle: int | None = 0 if self.warns else None
        """Steps without any step of an optimizer; `None` once one has stepped, or after the warning."""
        self._handles: list[RemovableHandle] = []
        self._covered: list[weakref.ref[torch.optim.Optimizer]] = []
        """In the order they were given; a session ends with its last name, so it keeps none alive."""
        self._new: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Optimizers that no earlier session of this process had."""
        self._updated: set[int] = set()
        """Optimizers that stepped since the step began."""
        self._left_out: set[int] = set()
        """Optimizers that did not step in the newest step."""

    def cover(self, optimizer: torch.optim.Optimizer) -> None:
        """Scale the learning rates of one more optimizer."""
        self._covered.append(weakref.ref(optimizer))
        self._handles += [
            optimizer.register_step_pre_hook(self.before_step),
            *scale_every_step(optimizer, lambda: self._factor),
            *correct_second_moments(optimizer, lambda: self.share),
            optimizer.register_step_post_hook(lambda each, *_: self._updated.add(id(each))),
        ]
        if optimizer not in _covered:
            self._new.add(optimizer)
            _covered.add(optimizer)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Optimizers of the session, in the order given."""
        return [found for each in self._covered if (found := each()) is not None]

    def newest_rate(self) -> float | None:
        """Learning rate of the newest step in the first group of the first optimizer; `None` where it has none."""
        for optimizer in self.optimizers:
            rate = optimizer.param_groups[0].get("lr")
            return None if rate is None else float(rate) * self._factor
        return None

    def follow(self, global_batch_size: int, rate_factor: float = 1.0) -> None:
        """Scale by this global batch size from now on, and by a decision's own factor."""
        self._factor = self.factor(global_batch_size) * rate_factor

    def remove(self) -> None:
        """Leave the optimizers as they were."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @property
    def begin_from_snapshot(self) -> bool:
        """Whether an optimizer has steps behind it before the session's first one; SGD without momentum cannot tell."""
        return any(
            bool(state["step"] > 0) if "step" in state else state.get("momentum_buffer") is not None
            for optimizer in self._new
            for state in optimizer.state.values()  # some make theirs before the first step, with 0
        )

    @property
    def any_since_step(self) -> bool:
        """Whether an optimizer stepped since the step began."""
        return bool(self._updated)

    def end_step(self) -> None:
        """End a step."""
        if self._left_out or len(self._updated) != len(self._covered):
            self._left_out = {id(each) for each in self.optimizers} - self._updated
        if self._num_idle is not None:
            self._num_idle = None if self._updated else self._num_idle + 1
            if self._num_idle == MAX_IDLE_STEPS:
                self._num_idle = None
                _log.warning(
                    "no optimizer given to attach has stepped in %d steps: pass the one whose step() is called (of an "
                    "optimizer around another the inner one), else no learning rate is scaled and no update is checked",
                    MAX_IDLE_STEPS,
                )
        self._updated.clear()

    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Hook before `optimizer.step`: everything must be ready for it.

        Warns once of a learning rate that follows the number of steps although these differ in length.

        Raises:
            RuntimeError: when the step is not, for `session.step` or `optimizer.step` was called at the wrong place.
        """
        batch = self.loader.current
        if batch is None and id(optimizer) in self._left_out:
            raise RuntimeError(
                "session.step(), or another loop over the loader, came before optimizer.step(): it belongs after it"
            )
        if batch is None and self.loader.are_kept:
            raise RuntimeError(
                "an update by a batch of a loop that is over, which the script has kept (itertools.cycle, a list): "
                "batches are not the same in each epoch, loop over the loader again, `while True: yield from loader`"
            )
        if batch is not None and not batch.is_last:
            raise RuntimeError(
                "optimizer.step() after a micro-batch that is not the step's last: call optimizer.step() and "
                "optimizer.zero_grad() only if session.sync_gradients"
            )
        if batch is not None and self.loader.num_untrained:
            raise RuntimeError(
                f"{self.loader.num_untrained} batches came and went before this update, so its gradient may be of "
                f"another batch: attach(look_ahead={self.loader.num_untrained}) if the script fetches batches ahead, "
                "gradient_accumulation_steps=N if it makes one step of N batches, session.step() in a batch that it "
                "skips; a resumed session skips what was used by itself"
            )
        self.prepare()
        if self.schedulers is None or self.schedulers.drives(optimizer):
            return
        rates = [group["lr"] for group in optimizer.param_groups]
        if self._num_changes > MAX_UNSCHEDULED_CHANGES or any(isinstance(rate, torch.Tensor) for rate in rates):
            return  # reading a tensor could wait for a GPU
        epoch = self.loader.position.epoch
        before = self._seen.get(id(optimizer))
        self._seen[id(optimizer)] = epoch, rates
        if before is not None and before[0] == epoch and before[1] != rates:
            self._num_changes += 1
            if self._num_changes > MAX_UNSCHEDULED_CHANGES:
                _log.warning(
                    "the learning rate changes with the number of steps, but with global_batch='adaptive' steps differ "
                    "in length: call session.schedule(scheduler) once and scheduler.step() no more, or compute the "
                    "rate from session.progress instead of a step counter"
                )
