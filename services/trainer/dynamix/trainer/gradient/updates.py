"""Updates: what has to be so when an optimizer steps, and how `optimizer.step` and `session.step` belong together.

A script that ends a step too early, or on every micro-batch of its own accumulation, trains on wrongly weighted
gradients without an error of torch's. The hooks of its optimizers show it, at no cost.
"""

import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from dynamix.trainer.data.loader import Loader

from .learning_rate import LearningRateScaler

_log = logging.getLogger("dynamix.trainer")

MAX_IDLE_STEPS = 20
"""Steps without any update, from the first one on, until the session's optimizers count as not the script's."""

_covered: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""Those of all sessions of this process: their steps are no snapshot's."""


class Updates:
    """The optimizers of one session."""

    def __init__(
        self,
        *,
        loader: Loader,
        before_update: Callable[[torch.optim.Optimizer], None],
        factor: Callable[[int], float],
        warns: bool = False,
    ) -> None:
        """`loader` has the batch to train on; `factor` is that of the learning rate by the global batch size.

        One rank `warns`.
        """
        self._loader = loader
        self._before_update = before_update
        self._factor_of = factor
        self._factor = 1.0
        self._num_idle: int | None = 0 if warns else None
        """Steps so far while no optimizer has stepped; `None` once one has, or it was said."""
        self._handles: list[RemovableHandle] = []
        self._covered: list[weakref.ref[torch.optim.Optimizer]] = []
        """In the order they were given; a session ends with its last name, so it keeps none alive."""
        self._scalers: dict[int, LearningRateScaler] = {}
        """By the optimizer's id, as below."""
        self._new: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Those of no earlier session of this process."""
        self._updated: set[int] = set()
        """Those that stepped since the step began."""
        self._left_out: set[int] = set()
        """Those that did not step in the newest step that ended."""

    def cover(self, optimizer: torch.optim.Optimizer) -> None:
        """Scale the learning rates of one more optimizer."""
        self._scalers[id(optimizer)] = LearningRateScaler()
        self._covered.append(weakref.ref(optimizer))
        self._handles += [
            optimizer.register_step_pre_hook(self.before_step),
            optimizer.register_step_post_hook(self.after_step),
        ]
        if optimizer not in _covered:
            self._new.add(optimizer)
            _covered.add(optimizer)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those of the session, in the order they were given."""
        return [found for each in self._covered if (found := each()) is not None]

    def newest_rate(self) -> float | None:
        """Learning rate of the newest step in the first group of the first optimizer; `None` where it has none."""
        for optimizer in self.optimizers:
            rate = optimizer.param_groups[0].get("lr")
            return None if rate is None else float(rate) * self._factor
        return None

    def follow(self, global_batch_size: int, rate_factor: float = 1.0) -> None:
        """Scale by this global batch size from now on, and by a decision's own factor."""
        self._factor = self._factor_of(global_batch_size) * rate_factor

    def remove(self) -> None:
        """Leave the optimizers as they were."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @property
    def begin_from_snapshot(self) -> bool:
        """Whether an optimizer has steps behind it before the session's first one; SGD without momentum cannot tell."""
        return any(_has_stepped(optimizer) for optimizer in self._new)

    @property
    def any_since_step(self) -> bool:
        """Whether an optimizer stepped since the step began."""
        return bool(self._updated)

    def end_step(self) -> None:
        """End a step."""
        self._left_out = self._scalers.keys() - self._updated
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
        """Hook before `optimizer.step`: everything must be ready for it, then its learning rates are scaled.

        Raises:
            RuntimeError: when the step is not, for `session.step` or `optimizer.step` was called at the wrong place.
        """
        batch = self._loader.current
        if batch is None and id(optimizer) in self._left_out:
            raise RuntimeError(
                "session.step() was called before optimizer.step(): call it after, as the last thing of a step"
            )
        if batch is not None and not batch.is_last:
            raise RuntimeError(
                "optimizer.step() after a micro-batch that is not the step's last: call optimizer.step() and "
                "optimizer.zero_grad() only if session.sync_gradients"
            )
        self._before_update(optimizer)
        self._scalers[id(optimizer)].scale(optimizer, self._factor)

    def after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Hook after `optimizer.step`."""
        self._scalers[id(optimizer)].restore(optimizer)
        self._updated.add(id(optimizer))


def _has_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its state is that of steps; some make theirs before the first, with a count of 0."""
    return any(
        bool(state["step"] > 0) if "step" in state else state.get("momentum_buffer") is not None
        for state in optimizer.state.values()
    )
