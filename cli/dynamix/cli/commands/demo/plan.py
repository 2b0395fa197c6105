"""The demo in numbers: what each run does, for the training script, and what the runs came to."""

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict

import msgspec

from dynamix.schemas.messages.allocation import GlobalBatch
from dynamix.schemas.policies import DEFAULT_POLICY, SPLIT_POLICY

if TYPE_CHECKING:  # the training script has no use for it
    from dynamix.recording.job_view import JobView

NUM_TRAINING_IMAGES = 60_000
LOOKS = 3
"""Evaluations in a row whose mean must be at the target: a single one differs from the next by about a percent."""


class AttachArguments(TypedDict, total=False):
    """The steering arguments of the script's call of `attach`."""

    policy: str
    global_batch: GlobalBatch


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the job: its policy, and what the script says for that."""

    policy: str
    arguments: AttachArguments
    what: str


def variants(adaptive_policy: str = DEFAULT_POLICY) -> list[Variant]:
    """The runs that the demo compares; `adaptive_policy` steers the one whose global batch may change."""
    adaptive = AttachArguments(global_batch="adaptive")
    if adaptive_policy != DEFAULT_POLICY:
        adaptive["policy"] = adaptive_policy
    return [
        Variant(policy="static", arguments={"policy": "static"}, what="as plain DDP"),
        Variant(policy=SPLIT_POLICY, arguments={}, what="the default: one global batch, divided by measured speed"),
        Variant(policy=adaptive_policy, arguments=adaptive, what="the policy moves the global batch too"),
    ]


class DemoPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes, paces and the goal; equal for all runs."""

    data: str | None = None
    """Directory with Fashion-MNIST's four idx files; the usual places when not given."""
    target_accuracy: float = 0.83
    """Held-out accuracy, in the mean of `LOOKS` evaluations, at which the clock stops."""
    local_batch_size: int = 128
    """Per rank at the start."""
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
    evaluate_every_samples: int = 5_120
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


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One run, as `--json` writes it."""

    policy: str
    seed: int
    time_to_target_s: float | None
    """Training seconds to the evaluation that had the target reached; `null` when none had."""
    target_accuracy: float
    final_accuracy: float | None
    median_step_time_s: float
    num_steps: int
    num_windows: int
    num_actions_applied: int
    local_batch_sizes: list[list[int]]
    """Per window, per rank."""


class DemoRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run with everything its figure needs."""

    summary: RunSummary
    progress: list[DemoStep]


def is_at_target(accuracies: Sequence[float], target_accuracy: float) -> bool:
    """Whether the mean of the newest evaluations has reached the target."""
    return len(accuracies) >= LOOKS and statistics.fmean(accuracies[-LOOKS:]) >= target_accuracy


def summarise(plan: DemoPlan, policy: str, progress: Sequence[DemoStep], view: "JobView") -> DemoRun:
    """Put a run together: the script's own log, and the job as its messages describe it."""
    accuracies: list[float] = []
    reached_s: float | None = None
    for line in progress:
        if line.accuracy is not None:
            accuracies.append(line.accuracy)
            if reached_s is None and is_at_target(accuracies, plan.target_accuracy):
                reached_s = line.trained_s
    sizes = [list(window.sizes) for window in view.history]
    summary = RunSummary(
        policy=policy,
        seed=plan.seed,
        time_to_target_s=reached_s,
        target_accuracy=plan.target_accuracy,
        final_accuracy=accuracies[-1] if accuracies else None,
        median_step_time_s=statistics.median(line.step_time_s for line in progress),
        num_steps=len(progress),
        num_windows=len(sizes),
        num_actions_applied=sum(window.applied is not None for window in view.windows.values()),
        local_batch_sizes=sizes,
    )
    return DemoRun(summary=summary, progress=list(progress))


def read_progress(lines: bytes) -> list[DemoStep]:
    """The script's log, without a last line that is still being written."""
    whole = lines[: lines.rfind(b"\n") + 1]
    return [msgspec.json.decode(line, type=DemoStep) for line in whole.splitlines()]
