"""Predictions: the same arms on a virtual cluster that was calibrated on a captured run of another policy."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from dynamix.arbitrator.learned.policy_file import SHIPPED_POLICIES, SUFFIX, shipped_directory
from dynamix.cli.commands.calibrate.command import from_capture
from dynamix.lab.calibration import CalibrationSettings, calibrate
from dynamix.lab.experiments.comparison.contenders import Setting, file_digest
from dynamix.lab.experiments.comparison.evaluation import ComparisonCell, ComparisonProgress, fill
from dynamix.lab.experiments.comparison.outcomes import counted_time_s
from dynamix.lab.experiments.comparison.runs import Ledger, RunTask
from dynamix.lab.simulator.scenario import Scenario
from dynamix.schemas.messages.allocation import option_number
from dynamix.schemas.messages.policies import initial_split
from dynamix.trainer import attach
from dynamix.trainer.attach import MIN_WINDOW_S, WINDOW_STEPS
from dynamix.trainer.job.options import bounds_of
from dynamix.trainer.steering.windows import stretch_to

from .arms import BASE_GLOBAL_BATCH_SIZE, LEARNING_RATE, RECORDED, TargetArm
from .cases import TargetCase
from .outcomes import LOOKS
from .ranks import WORKLOAD

NUM_SEEDS = 2
"""Seeds of the virtual runs, which cost a few seconds each; one alone is some 10 % off."""
EVALUATE_EVERY_S = 1.0
SESSION_S, TRACKING_S, WINDOW_S = -0.00025, 0.00047, 0.006
"""Processor time that a session takes of each host beside plain DDP: per step, more of it where the ranks divide the
batch, and per window (`bench.cluster.target.session_cost`). Its loader costs less than torch's own."""
EVALUATION_SAMPLES = 2_000
"""Held-out samples, the first ones: to look at all of them every half second would take longer than to train."""


class Predicted(msgspec.Struct, frozen=True, kw_only=True):
    """What a virtual cluster says of a case."""

    times_s: dict[str, list[float]] = {}
    """By row, the counted time of each seed."""
    median_error: float | None = None
    """Relative error of the calibration's step times, over windows that its fit had not seen."""
    reason: str = ""
    """Why there is no prediction."""


class CalibratedCase(NamedTuple):
    """A case, and the virtual cluster that stands for it."""

    case: TargetCase
    scenario: Scenario
    median_error: float


def calibrated(case: TargetCase, capture: Path, target_accuracy: float, grid_s: float) -> CalibratedCase:
    """The scenario that `dynamix calibrate` makes of a capture, with this comparison's goal; the fit's median error.

    Raises:
        ValueError: when it cannot be fitted.
    """
    found = from_capture(capture)
    settings = CalibrationSettings(
        workload=WORKLOAD, name=case.name, learning_rate=LEARNING_RATE, target_accuracy=target_accuracy
    )
    calibration = calibrate(found.windows, settings, found.job)
    scenario = msgspec.structs.replace(
        calibration.scenario,
        fixed_time_s=0.0,
        time_limit_s=case.time_limit_s,
        target_looks=LOOKS,
        evaluate_every_s=max(grid_s, EVALUATE_EVERY_S),
        evaluation_samples=EVALUATION_SAMPLES,
        noise_every=inspect.signature(attach).parameters["noise_every"].default,
        base_global_batch_size=BASE_GLOBAL_BATCH_SIZE,
    )
    return CalibratedCase(case, scenario, calibration.median_error)


def session_s(arm: TargetArm, step_s: float) -> float:
    """Processor time of a host that a step of an arm takes beside plain DDP, where steps take about `step_s`."""
    if arm.policy is None:
        return 0.0
    window_steps = arm.window_steps or WINDOW_STEPS * stretch_to(MIN_WINDOW_S, WINDOW_STEPS * step_s)
    options = {name: option_number(name, value) for name, value in arm.options.items()}
    tracks = initial_split(arm.policy, options, supports_tracking=True) == "tracking"
    return SESSION_S + (TRACKING_S if tracks else 0.0) + WINDOW_S / window_steps


def with_session_of(arm: TargetArm, known: CalibratedCase) -> Scenario:
    """The scenario with what a session costs the arm, instead of what it cost the captured run with its short windows.

    A host's share of a processor stretches it. None of it is taken off where a rank's fixed time was found to be less.
    """
    step_s = max(group.overhead_s + arm.local_batch_size / group.samples_per_s for group in known.scenario.workers)
    less_s = session_s(RECORDED, step_s) - session_s(arm, step_s)
    workers = tuple(
        msgspec.structs.replace(
            group, count=1, overhead_s=max(0.0, group.overhead_s - less_s / known.case.cores_of(rank, 0.0))
        )
        for rank, group in enumerate(known.scenario.per_worker)
    )
    return msgspec.structs.replace(known.scenario, workers=workers)


def task_of(scenario: Scenario, arm: TargetArm, seed: int) -> RunTask:
    """A virtual run of an arm, within the bounds that `attach` would give it."""
    sizes = (arm.local_batch_size,) * scenario.world_size
    low, high = bounds_of(sizes, arm.global_batch, (None, None), 1)
    bounded = msgspec.structs.replace(
        scenario,
        initial_local_batch_size=arm.local_batch_size,
        min_local_batch_size=low,
        max_local_batch_size=high,
        window_steps=arm.window_steps or WINDOW_STEPS,
    )
    exchange = None if arm.exchange == "exact" else arm.exchange
    options = {name: option_number(name, value) for name, value in arm.options.items()}
    setting = Setting(policy=arm.policy or "static", options=options, exchange=exchange)
    if arm.policy in SHIPPED_POLICIES:
        file = shipped_directory() / f"{arm.policy}{SUFFIX}"
        setting = msgspec.structs.replace(setting, policy_file=str(file), policy_digest=file_digest(file))
    return RunTask(scenario=bounded, setting=setting, seed=seed)


def predict(
    cases: Sequence[CalibratedCase],
    arms: Mapping[str, Mapping[str, TargetArm]],
    work: Path,
    on_progress: Callable[[ComparisonProgress], None],
    *,
    num_seeds: int = NUM_SEEDS,
    jobs: int = 2,
    data: Path | None = None,
) -> dict[str, Predicted]:
    """Run the arms of every case, by name and row, in its calibrated scenario; what was run before is not run again."""
    cells: dict[tuple[str, str], list[ComparisonCell]] = {}
    for known in cases:
        for row, arm in arms[known.case.name].items():
            scenario, label = with_session_of(arm, known), f"{known.case.name} {row}"
            tasks = [task_of(scenario, arm, seed) for seed in range(1, 1 + num_seeds)]
            cells[known.case.name, row] = [ComparisonCell(label, 0, task) for task in tasks]
    with Ledger(work / "predictions.jsonl") as ledger:
        fill([cell for some in cells.values() for cell in some], ledger, jobs=jobs, data=data, on_progress=on_progress)
        times_s = {place: [_counted(ledger, cell.task) for cell in some] for place, some in cells.items()}
    return {
        name: Predicted(times_s={row: times_s[name, row] for row in arms[name]}, median_error=error)
        for name, error in ((known.case.name, known.median_error) for known in cases)
    }


def _counted(ledger: Ledger, task: RunTask) -> float:
    outcome = ledger.get(task)
    assert outcome is not None, "it was just run"
    return counted_time_s(outcome.time_to_target_s, task.scenario.time_limit_s)
