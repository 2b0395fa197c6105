"""What one measurement of scale runs: how many workers in how many jobs, how fast, for how long."""

import msgspec
from bench.messages.load import RANKS_PER_NODE

from dynamix.schemas.messages.fields import MAX_RANKS

WARM_UP_WINDOWS = 5
"""Windows of each job before those that are judged: the first ones import, compile checkers and fill caches."""
MEMORY_WARM_UP_S = 300.0
"""Growth of memory is counted from here on, or from a fifth of a shorter run."""


class ScalePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement. Workers are those of all jobs together."""

    workers: int = 1024
    jobs: int = 1
    rate: float = 1.0
    """Windows per second of each job."""
    seconds: float = 60.0
    policy: str = "static"
    background: bool = False
    """Whether metric windows and rewards pass through the stream as well, as in a real system."""
    spread_s: float = 0.0
    """Time over which a job's nodes send the states of one window; 0: all at once, which is the hardest."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError, naming the value, for what cannot be run."""
        if not 1 <= self.jobs <= self.workers or self.workers % self.jobs:
            raise ValueError(f"--jobs must divide --workers {self.workers} without a rest, {self.jobs} does not")
        if self.workers_per_job > MAX_RANKS:
            raise ValueError(f"a job has at most {MAX_RANKS} ranks, not {self.workers_per_job}: take more --jobs")
        if self.rate <= 0 or self.seconds <= 0 or self.rate * self.seconds < 1:
            raise ValueError(f"--rate {self.rate:g} and --seconds {self.seconds:g} must make at least one window")
        if not 0 <= self.spread_s < self.interval_s:
            raise ValueError(
                f"--spread must be from 0 to below the window's {self.interval_s:g} s, not {self.spread_s}"
            )

    @property
    def workers_per_job(self) -> int:
        """Ranks of one job."""
        return self.workers // self.jobs

    @property
    def nodes_per_job(self) -> int:
        """Nodes of one job; the last one may hold fewer ranks than the others."""
        return -(-self.workers_per_job // RANKS_PER_NODE)

    @property
    def interval_s(self) -> float:
        """Time between two windows of one job."""
        return 1.0 / self.rate

    @property
    def num_windows(self) -> int:
        """Windows of each job that are judged."""
        return round(self.rate * self.seconds)

    @property
    def all_windows(self) -> int:
        """Windows of each job, with those to warm up."""
        return WARM_UP_WINDOWS + self.num_windows

    @property
    def memory_warm_up_s(self) -> float:
        """Where counting the growth of memory begins."""
        return min(MEMORY_WARM_UP_S, self.seconds / 5)
