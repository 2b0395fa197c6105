"""Where windows end: after `window_steps` optimizer steps, or several times as many where steps are short. Pure.

What the end of a window costs a host does not depend on its steps: some 6 ms of a processor (docs/overhead.md), a tenth
of the time of ten steps of 26 ms on 0.4 of one. So windows that would be over in less than `min_window_s` are made
several times as long, after the first ones: a job that has just begun has most to decide.

Every rank derives the ends from the same numbers, those that the ranks gather at the end of each window, and so comes
to the same. They are known one `margin_steps` ahead: an action is sent to all ranks that long before it begins to rule.
"""

import math
from bisect import bisect_right

FIRST_WINDOWS = 8
"""Windows that are never stretched."""
MOST_STRETCH = 16
"""Longest window, in `window_steps`: steps that suddenly take much longer still end one in time."""


class Windows:
    """The starts of windows, counted from a generation's first step."""

    def __init__(self, window_steps: int, margin_steps: int, min_window_s: float = 0.0, first_step: int = 0) -> None:
        self._window_steps = window_steps
        self._margin_steps = margin_steps
        self._min_window_s = min_window_s
        self._starts = [first_step]
        """Starts of the windows that still matter, in order; before the last one lie all whose lengths are decided."""
        self._first = 0
        """The number of the window that starts at the first of them."""
        self._plan(first_step, 1)

    def window_of(self, step: int) -> int:
        """The window that a step belongs to, from the one before the last that was measured on."""
        place = bisect_right(self._starts, step) - 1
        assert place >= 0, f"step {step} is of a window that was forgotten"
        return self._first + place

    def is_start(self, step: int) -> bool:
        """Whether a window starts at a step, which is no later than `margin_steps` from now."""
        return self._starts[bisect_right(self._starts, step) - 1] == step

    def num_steps(self, window: int) -> int:
        """Steps of a window that has ended."""
        place = window - self._first
        return self._starts[place + 1] - self._starts[place]

    def stretch(self, window: int) -> int:
        """How many times `window_steps` they are."""
        return self.num_steps(window) // self._window_steps

    def measured(self, window: int, step_time_s: float) -> None:
        """Plan ahead after a window: all ranks give the same time per step, evaluations between steps included."""
        end = self._starts[window + 1 - self._first]
        forgotten = window - self._first
        del self._starts[:forgotten]
        self._first += forgotten
        is_first = window + 1 < FIRST_WINDOWS
        self._plan(end, 1 if is_first else stretch_to(self._min_window_s, self._window_steps * step_time_s))

    def _plan(self, end: int, stretch: int) -> None:
        """Decide the length of the window that begins at `end`, and of all that may start before the next plan."""
        starts, shortest = self._starts, self._window_steps
        if starts[-1] <= end:
            starts.append(end + shortest * stretch)
        following = starts[bisect_right(starts, end)]
        while starts[-1] + shortest <= following + self._margin_steps:
            starts.append(starts[-1] + shortest * stretch)


def stretch_to(min_window_s: float, window_s: float) -> int:
    """How many windows that last `window_s` make one of `min_window_s`; 1 where nothing tells."""
    if not 0.0 < window_s < min_window_s:
        return 1
    return min(math.ceil(min_window_s / window_s), MOST_STRETCH)
