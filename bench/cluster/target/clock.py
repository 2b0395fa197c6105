"""The clock of a run: training time, which stands still while all ranks wait at a point of its grid.

All ranks must know at which step they wait, or those that are faster would compute a step for nothing. No message is
spent on it while the clock runs: at each check-in rank 0 tells the others the number of steps to the next one, a little
fewer than it takes to the next point of the grid, so that a step that became slower is noticed before.
"""

CAUTION = 0.8
FIRST_STEPS = 2
"""Before the time of a step is known."""


class TrainingClock:
    """Training time of rank 0.

    Attributes:
        trained_s: up to the last check-in.
    """

    def __init__(self, grid_s: float, now_s: float) -> None:
        self.trained_s = 0.0
        self._grid_s = grid_s
        self._due_s = grid_s
        self._began_s = now_s
        self._num_steps = FIRST_STEPS
        self._step_s = 0.0

    def check_in(self, now_s: float) -> bool:
        """Stop the clock at a check-in; whether a point of the grid is reached, at which the accuracy is due."""
        passed_s = now_s - self._began_s
        self.trained_s += passed_s
        self._step_s = passed_s / self._num_steps
        is_due = self.trained_s >= self._due_s
        while self._due_s <= self.trained_s:
            self._due_s += self._grid_s
        return is_due

    @property
    def num_steps(self) -> int:
        """Steps to the next check-in."""
        return max(1, int(CAUTION * (self._due_s - self.trained_s) / self._step_s))

    def go_on(self, now_s: float) -> None:
        """Let the clock run again."""
        self._num_steps = self.num_steps
        self._began_s = now_s
