"""Learning-rate schedules while the global batch changes: advanced by samples, not by steps."""

import logging
import math
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

_log = logging.getLogger("dynamix.trainer")

MAX_UNSCHEDULED_CHANGES = 2
"""Changes of a learning rate in the middle of epochs until it counts as a schedule by steps."""


class Schedulers:
    """Schedulers of the user that advance by reference steps (`data.reference_steps`)."""

    def __init__(self) -> None:
        self._schedulers: list[LRScheduler] = []
        self._num_done = 0

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._schedulers)

    def add(self, scheduler: LRScheduler, reference_steps: float) -> None:
        """Advance this one too, from where the run stands.

        Raises:
            TypeError: when it does not count steps.
        """
        if isinstance(scheduler, ReduceLROnPlateau) or not isinstance(scheduler, LRScheduler):
            raise TypeError(
                f"session.schedule takes a torch.optim.lr_scheduler.LRScheduler that counts steps: call the step "
                f"method of a {type(scheduler).__name__} yourself"
            )
        if not self._schedulers:
            self.begin(reference_steps)
        self._schedulers.append(scheduler)

    def begin(self, reference_steps: float) -> None:
        """Count from here on: the schedulers stand where the run stands."""
        self._num_done = math.floor(reference_steps)

    def advance(self, reference_steps: float) -> None:
        """Step them for every whole reference step that has been completed."""
        due = math.floor(reference_steps)
        for _ in range(due - self._num_done):
            for scheduler in self._schedulers:
                scheduler.step()
        self._num_done = max(due, self._num_done)

    def drives(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether one of them sets the learning rate of an optimizer."""
        return any(scheduler.optimizer is optimizer for scheduler in self._schedulers)


class StepScheduleWarning:
    """Warns once when a learning rate follows the number of steps although steps are no longer equally long."""

    def __init__(self, schedulers: Schedulers) -> None:
        self._schedulers = schedulers
        self._seen: dict[int, tuple[int, list[Any]]] = {}
        """By optimizer: the epoch and the learning rates of its newest update."""
        self._num_changes = 0

    def observe_update(self, optimizer: torch.optim.Optimizer, epoch: int) -> None:
        """Look at the learning rates that an update begins with."""
        if self._num_changes > MAX_UNSCHEDULED_CHANGES or self._schedulers.drives(optimizer):
            return
        rates = [group["lr"] for group in optimizer.param_groups]
        if any(isinstance(rate, torch.Tensor) for rate in rates):  # reading it could wait for a GPU
            return
        before = self._seen.get(id(optimizer))
        self._seen[id(optimizer)] = epoch, rates
        if before is None or before[0] != epoch or before[1] == rates:
            return
        self._num_changes += 1
        if self._num_changes > MAX_UNSCHEDULED_CHANGES:
            _log.warning(
                "the learning rate changes with the number of steps, but with global_batch='adaptive' steps differ in "
                "length: call session.schedule(scheduler) once and scheduler.step() no more, or compute the rate from "
                "session.progress instead of a step counter"
            )
