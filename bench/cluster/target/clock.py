"""The clock of a run: training time, which stands still while the accuracy is looked up and all ranks wait.

All ranks must know at which step they wait, or those that are faster would compute a step for nothing. So they check
in together now and then, by one small all-reduce: rank 0 says that the accuracy is due, or how many steps later they
check in again. These are a few less than it takes to the next point of the grid, so that steps that became slower are
noticed before. The clock runs meanwhile, until the slowest rank has checked in: what it still had to do is training.
"""

CAUTION = 0.8
FEW_STEPS = 8
"""For so few to the next point there is no check-in before it: each costs a millisecond or more."""
FIRST_STEPS = 2
"""Before the time of a step is known."""


class TrainingClock:
    """Training time of rank 0.

    Attributes:
        trained_s: up to the last stop.
    """

    def __init__(self, grid_s: float, now_s: float) -> None:
        self.trained_s = 0.0
        self._grid_s = grid_s
        self._due_s = grid_s
        self._resumed_s = now_s
        self._checked_in_s = now_s
        self._num_steps = FIRST_STEPS
        self._step_s = 0.0

    def check_in(self, now_s: float) -> int:
        """The number of steps to the next check-in; 0 when a point of the grid is reached."""
        self._step_s = (now_s - self._checked_in_s) / self._num_steps
        self._checked_in_s = now_s
        trained_s = self.trained_s + now_s - self._resumed_s
        return 0 if trained_s >= self._due_s else self._plan_steps(trained_s)

    def stop(self, now_s: float) -> None:
        """Let it stand still, once all ranks have checked in."""
        self.trained_s += now_s - self._resumed_s
        while self._due_s <= self.trained_s:
            self._due_s += self._grid_s

    def plan_steps(self) -> int:
        """The number of steps to the next check-in, while it stands still."""
        return self._plan_steps(self.trained_s)

    def go_on(self, now_s: float) -> None:
        """Let it run again."""
        self._resumed_s = self._checked_in_s = now_s

    def _plan_steps(self, trained_s: float) -> int:
        steps = (self._due_s - trained_s) / self._step_s
        self._num_steps = max(1, round(steps) if steps < FEW_STEPS else int(CAUTION * steps))
        return self._num_steps
