"""What the demo does, in numbers: shared by the command, the training script and the results."""

import msgspec

NUM_TRAINING_IMAGES = 60_000


class DemoPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes, paces and the goal; equal for both runs."""

    data: str | None = None
    """Directory with Fashion-MNIST's four idx files; the usual places when not given."""
    target_accuracy: float = 0.83
    """Held-out accuracy at which the clock stops."""
    local_batch_size: int = 128
    """Per rank at the start; both runs keep its sum."""
    window_steps: int = 10
    min_windows: int = 30
    """Train on to this many windows even when the target is reached before."""
    max_windows: int = 120
    """Give up after this many: the target was not reached."""
    num_ranks: int = 4
    pace_s_per_sample: float = 0.0005
    """Stated compute time of one sample on an ordinary rank: the ranks sleep to it."""
    slow_rank: int = 3
    slowdown: float = 3.0
    """How many times slower the slow rank is."""
    evaluate_every_samples: int = 10_240
    learning_rate: float = 0.05
    momentum: float = 0.9
    seed: int = 1

    @property
    def num_epochs(self) -> int:
        """Passes over the 60,000 training images that `max_windows` can need."""
        samples = self.max_windows * self.window_steps * self.local_batch_size * self.num_ranks
        return 1 + samples // NUM_TRAINING_IMAGES

    def pace_of(self, rank: int) -> float:
        """Seconds per sample that a rank is paced to."""
        return self.pace_s_per_sample * (self.slowdown if rank == self.slow_rank else 1.0)


class DemoStep(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the training script's own log, written by rank 0 after each step."""

    step: int
    trained_s: float
    """Training time so far: evaluation is not in it."""
    step_time_s: float
    samples: int
    accuracy: float | None = None
    """Held-out accuracy, on the steps where it was evaluated."""
