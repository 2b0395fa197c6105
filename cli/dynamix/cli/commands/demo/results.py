"""What the runs of a demo came to: one summary per run, from the script's own log and the messages on the bus."""

import statistics
from collections.abc import Sequence

import msgspec

from dynamix.schemas.messages import Applied, Report

from .plan import DemoPlan, DemoStep


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One run, as `--json` writes it."""

    policy: str
    seed: int
    time_to_target_s: float | None
    """Training seconds to the first evaluation at the target; `null` when it was not reached."""
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


def summarise(
    plan: DemoPlan, policy: str, progress: Sequence[DemoStep], reports: Sequence[Report], applied: Sequence[Applied]
) -> DemoRun:
    """Put a run's parts together; `reports` may hold windows of several nodes, in any order."""
    evaluated = [line for line in progress if line.accuracy is not None]
    reached = next((line for line in evaluated if line.accuracy >= plan.target_accuracy), None)  # type: ignore[operator] # not None: just filtered
    sizes = _sizes_per_window(reports)
    summary = RunSummary(
        policy=policy,
        seed=plan.seed,
        time_to_target_s=None if reached is None else reached.trained_s,
        target_accuracy=plan.target_accuracy,
        final_accuracy=evaluated[-1].accuracy if evaluated else None,
        median_step_time_s=statistics.median(line.step_time_s for line in progress),
        num_steps=len(progress),
        num_windows=len(sizes),
        num_actions_applied=len({message.decided_window for message in applied}),
        local_batch_sizes=sizes,
    )
    return DemoRun(summary=summary, progress=list(progress))


def read_progress(lines: bytes) -> list[DemoStep]:
    """The script's log, without a last line that is still being written."""
    whole = lines[: lines.rfind(b"\n") + 1]
    return [msgspec.json.decode(line, type=DemoStep) for line in whole.splitlines()]


def _sizes_per_window(reports: Sequence[Report]) -> list[list[int]]:
    windows: dict[int, dict[int, int]] = {}
    for report in reports:
        windows.setdefault(report.window, {}).update({row.rank: row.local_batch_size for row in report.rows})
    return [[sizes[rank] for rank in sorted(sizes)] for _, sizes in sorted(windows.items())]
