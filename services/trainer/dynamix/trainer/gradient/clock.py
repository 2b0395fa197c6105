"""Clocks: the parts of a step's time.

A step runs from the loader being asked for a batch to `session.step` returning. Five moments divide it into four times
whose sum is the step's: asked, (data) handed out, (compute) last gradient bucket ready, (sync) gradient reduced,
(update) end. Where a step has several micro-batches or gradients of several models, what was spent on data or waiting
in between is taken off the compute time. What lies between two steps, such as an evaluation, is in none of them.
"""

import itertools
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import torch

Moment = Any
"""A reading of the monotonic clock in seconds, or on a GPU a CUDA event."""


class StepTimes(NamedTuple):
    """The parts of a step in seconds."""

    data_s: float
    compute_s: float
    sync_s: float
    update_s: float

    @property
    def step_s(self) -> float:
        """The whole step: the sum of its parts."""
        return self.data_s + self.compute_s + self.sync_s + self.update_s


class Ended(NamedTuple):
    """A step that is done."""

    moments: tuple[Moment, Moment, Moment, Moment, Moment]
    """Asked, handed out, ready, reduced, end."""
    charged_s: float
    num_samples: int
    fetches: tuple[tuple[Moment, Moment], ...] = ()
    """While computing, from asking for a further micro-batch to having it."""
    waits: tuple[tuple[Moment, Moment], ...] = ()
    """While computing, from the last bucket of a gradient to having it reduced."""
    averaging: tuple[Moment, Moment] | None = None
    """Start and end of the averaging after the update, at the end of a round of local steps."""


class Clock:
    """Takes the moments of each step as they come, in the training thread.

    On the CPU that is one read of the monotonic clock per moment, some 50 ns each.
    """

    late_steps: ClassVar[int] = 0
    """Steps by which a timing may be late: `seconds_per_sample` holds only after so many steps of equal sizes."""

    def __init__(self) -> None:
        self.own_s = 0.0
        """Time of the training thread in our code, which plain training does not have."""
        self._ended: list[Ended] = []
        self._num_samples = 0
        self.charged_s = 0.0
        """Our own work after a step's end, which counts as the next step's update."""
        self._last: StepTimes | None = None
        self._asked: Moment | None = None
        self._handed_out: Moment | None = None
        self._ready: Moment | None = None
        self._reduced: Moment | None = None
        self._asked_again: Moment | None = None
        self._fetches: list[tuple[Moment, Moment]] = []
        self._waits: list[tuple[Moment, Moment]] = []
        self._averaging: tuple[Moment, Moment] | None = None
        self.in_step = False
        """Whether a batch of a step was handed out, and the step has not ended."""

    def asked(self) -> None:
        """The script requests a batch: the step's first, or a further micro-batch."""
        if self.in_step:
            self._asked_again = self._now(None)
        else:
            self._asked = self._now(None)

    def handed_out(self, num_samples: int = 0) -> None:
        """The batch goes to the user's code; `num_samples` of it count."""
        now = self._now(None)
        if self.in_step:
            self._fetches.append((self._asked_again, now))
            self._num_samples += num_samples
        else:
            self._handed_out, self._num_samples, self.in_step = now, num_samples, True

    def discard(self) -> None:
        """Forget the step under way: the script left it."""
        self._handed_out = self._ready = self._reduced = None
        self._fetches, self._waits, self._averaging, self.in_step = [], [], None, False

    def gradient_ready(self) -> None:
        """This rank's last bucket of a gradient is ready to be reduced."""
        if self._ready is not None and self._reduced is not None:
            self._waits.append((self._ready, self._reduced))
            self._ready = self._reduced = None
        self._ready = self._now(self._ready)

    def reduced(self) -> None:
        """The gradient came back."""
        self._reduced = self._now(self._reduced)

    @contextmanager
    def averaging(self) -> Iterator[None]:
        """Count what is done meanwhile, after the update, as waiting for other ranks."""
        began, began_s = self._now(None), time.perf_counter()
        yield
        self._averaging = began, self._now(None)
        self.own_s -= time.perf_counter() - began_s

    def before_update(self) -> None:
        """The optimizer begins; if no bucket was seen, computing ends here."""
        if self._ready is None:
            self._ready = self._now(None)

    def end(self) -> None:
        """The step is done."""
        end = self._now(None)
        ready = end if self._ready is None else self._ready
        reduced = ready if self._reduced is None else self._reduced
        moments = (self._asked, self._handed_out, ready, reduced, end)
        parts = tuple(self._fetches), tuple(self._waits), self._averaging
        self._ended.append(Ended(moments, self.charged_s, self._num_samples, *parts))
        self.charged_s = 0.0
        self.discard()

    def take_times(self) -> list[StepTimes]:
        """The steps ended since the last call; waits for the device where there is one."""
        ended, self._ended = self._ended, []
        times = [self._times(step) for step in ended]
        self._last = times[-1] if times else self._last
        return times

    def _times(self, step: Ended) -> StepTimes:
        """A reduction runs beside the computing and may come back before the last bucket is noted: never below zero."""
        (asked, handed_out, ready, reduced, end), between = step.moments, self._between
        data, compute = max(between(asked, handed_out), 0.0), max(between(handed_out, ready), 0.0)
        sync, update = max(between(ready, reduced), 0.0), max(between(reduced, end), 0.0)
        if step.fetches or step.waits:
            fetched, waited = self._total(step.fetches), self._total(step.waits)
            data, compute, sync = data + fetched, max(compute - fetched - waited, 0.0), sync + waited
        if step.averaging is not None:
            averaged = max(between(*step.averaging), 0.0)
            sync, update = sync + averaged, max(update - averaged, 0.0)
        return StepTimes(data, compute, sync, update + step.charged_s)

    def _total(self, parts: Iterable[tuple[Moment, Moment]]) -> float:
        return sum(max(self._between(*part), 0.0) for part in parts)

    @property
    def last(self) -> StepTimes | None:
        """The newest step whose times are known."""
        return self._times(self._ended[-1]) if self._ended else self._last

    def seconds_per_sample(self) -> float:
        """Compute time over samples of the step under way, once its gradient is ready; 0 without samples."""
        if self._num_samples == 0 or self._handed_out is None or self._ready is None:
            return 0.0
        compute_s = self._between(self._handed_out, self._ready)
        if self._fetches or self._waits:
            compute_s -= self._total(self._fetches) + self._total(self._waits)
        return max(compute_s, 0.0) / self._num_samples

    def _now(self, replaced: Moment | None) -> Moment:  # noqa: ARG002 - a number needs no replacing
        """This moment; `replaced` is one that it stands in for."""
        return time.perf_counter()

    def _between(self, earlier: Moment, later: Moment) -> float:
        seconds: float = later - earlier
        return seconds


class DeviceClock(Clock):
    """Clock for training on a GPU: one CUDA event per moment, read when the window ends, never a wait per step.

    Events stand in the stream, so a batch that was ready while the device was still busy shows no data time, and a
    host that runs ahead is not mistaken for a fast device.
    """

    late_steps: ClassVar[int] = 3

    def __init__(self) -> None:
        super().__init__()
        self._free: list[torch.cuda.Event] = []
        self._num_returned = 0
        """Number of ended steps that were returned, or skipped because a newer one was returned."""
        self._unreturned = 0.0

    @property
    def last(self) -> StepTimes | None:
        """The last step of the newest window: nothing waits for the device in between."""
        return self._last

    def seconds_per_sample(self) -> float:
        """Compute time over samples of the newest step that the device has done and that was not returned yet.

        Usually that is the one before this; 0 without one.
        """
        for index in range(len(self._ended) - 1, self._num_returned - 1, -1):
            if self._ended[index].moments[-1].query():
                self._unreturned = self._rate(self._ended[index])
                self._num_returned = index + 1
                break
        value, self._unreturned = self._unreturned, 0.0
        return value

    def _rate(self, step: Ended) -> float:
        return self._times(step).compute_s / step.num_samples if step.num_samples else 0.0

    def take_times(self) -> list[StepTimes]:
        """The steps ended since the last call, once the device has done them; their events are used again."""
        ended = self._ended
        if ended:
            ended[-1].moments[-1].synchronize()
        if len(ended) > self._num_returned:
            self._unreturned = self._rate(ended[-1])
        self._num_returned = 0
        times = super().take_times()
        for step in ended:
            moments = itertools.chain(step.moments, *step.fetches, *step.waits, step.averaging or ())
            self._free += {id(event): event for event in moments}.values()  # some stand for two moments
        return times

    def _now(self, replaced: torch.cuda.Event | None) -> torch.cuda.Event:
        event = replaced or (self._free.pop() if self._free else torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _between(self, earlier: torch.cuda.Event, later: torch.cuda.Event) -> float:
        return 0.0 if earlier is later else earlier.elapsed_time(later) / 1000
