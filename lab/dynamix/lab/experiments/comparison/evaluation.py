"""An evaluation: plan the episodes that a comparison needs, and run those whose outcome is not in the ledger."""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple, get_args

from dynamix.arbitrator.learned.policy import LearnedPolicy
from dynamix.arbitrator.learned.policy_file import PolicyFile
from dynamix.arbitrator.policies.policy import Policy
from dynamix.arbitrator.policies.static import Static
from dynamix.lab.experiments.episodes.episode import run_episode
from dynamix.lab.experiments.episodes.pool import EpisodePool, workload_data
from dynamix.lab.experiments.episodes.suite import Suite
from dynamix.lab.simulator.clairvoyant import ClairvoyantCluster
from dynamix.lab.simulator.cluster import VirtualCluster
from dynamix.schemas.messages.allocation import ExchangePermission, initial_exchange, is_permitted

from .baselines import known_policy
from .contenders import ORACLE, Contender, Setting
from .runs import Ledger, RunOutcome, RunTask
from .tuned import Tuned


class ComparisonCell(NamedTuple):
    """One cell of the comparison and the run that it needs; two cells may need the same run."""

    label: str
    policy_seed: int
    """Index of the learned policy's file; 0 for a policy without."""
    task: RunTask

    @property
    def family(self) -> str:
        """Family of the scenario."""
        return self.task.scenario.family

    @property
    def about(self) -> str:
        """Row, scenario and seed, for readers of the ledger."""
        return f"{self.label} #{self.policy_seed} in {self.task.scenario.name}, seed {self.task.seed}"


class ComparisonProgress(NamedTuple):
    """Progress of a comparison after a run."""

    num_done: int
    num_total: int
    left_s: float | None
    """Forecast of the wall-clock time left; `None` before the first run."""
    newest: str


def plan(
    suite: Suite, contenders: Sequence[Contender], seeds: Sequence[int], tuned: Tuned, *, crossed: bool = True
) -> list[ComparisonCell]:
    """Return every cell of a comparison: contenders, policy seeds, scenarios and seeds, in the order to run them.

    A contender that is the best of others has no cells of its own, but theirs.

    All rows of a seed come before the next seed, so that an interrupted comparison is complete for the first seeds.
    Without `crossed` each scenario seed is run under one policy seed, in turn: as many runs per row as for a policy
    that is not learned. The interval then covers 99 % instead of 95 % (simulated, 5 x 12 seeds).

    Raises:
        ValueError: when a contender lacks what it needs, or asks for what a job does not permit.
    """
    rows = {part.label: part for contender in contenders for part in contender.best_of or (contender,)}
    settings = {
        (label, family): contender.settings(family, tuned)
        for label, contender in rows.items()
        for family in suite.families
    }
    cells = [
        ComparisonCell(label, index, RunTask(scenario=scenario, setting=setting, seed=seed))
        for turn, seed in enumerate(seeds)
        for scenario in suite.scenarios
        for label in rows
        for index, setting in _in_turn(settings[label, scenario.family], None if crossed else turn)
    ]
    for cell in cells:
        if cell.task.seed == seeds[0]:
            _check_permission(cell)
    return cells


def _check_permission(cell: ComparisonCell) -> None:
    """Raise ValueError where gradients would travel from the first step on as the job does not permit."""
    setting, scenario = cell.task.setting, cell.task.ruling_scenario
    first = initial_exchange(setting.policy, setting.options)
    if is_permitted(first, scenario.exchange):
        return
    needed = next(each for each in get_args(ExchangePermission) if is_permitted(first, each))
    how = "leave the row out" if not scenario.permits_any_exchange else f"--exchange {needed}, or /exchange={needed}"
    raise ValueError(
        f"policy {cell.label!r} asks for gradients {first.label}, which scenario {scenario.name} does not permit: {how}"
    )


def _in_turn(settings: Sequence[Setting], turn: int | None) -> Iterator[tuple[int, Setting]]:
    """Yield the settings of a row with their policy seeds: all of them, or only the one of this turn."""
    for index, setting in enumerate(settings):
        if turn is None or index == turn % len(settings):
            yield index, setting


def fill(
    cells: Iterable[ComparisonCell],
    ledger: Ledger,
    *,
    jobs: int = 1,
    data: Path | None = None,
    on_progress: Callable[[ComparisonProgress], None] | None = None,
) -> None:
    """Run the cells whose outcome is not in the ledger; a run that several cells need is run once.

    Raises:
        EpisodeError: when an episode raises. Outcomes before it are in the ledger.
    """
    needed = {cell.task.key: cell for cell in cells}
    missing = {key: cell for key, cell in needed.items() if cell.task not in ledger}
    tasks = [cell.task for cell in missing.values()]
    forecast = Forecast(tasks, jobs)
    first = len(needed) - len(missing) + 1
    for number, (task, outcome) in enumerate(outcomes(tasks, jobs=jobs, data=data), start=first):
        cell = missing[task.key]
        ledger.record_outcome(task, outcome, cell.about)
        forecast.record_run(task, outcome)
        if on_progress is not None:
            on_progress(ComparisonProgress(number, len(needed), forecast.left_s(), cell.about))


TYPICAL_RUN_S = 3.0
"""Mean over families, of one core: what a run is taken to need where none was made yet."""


class Estimate(NamedTuple):
    """What a comparison will cost before it begins."""

    num_runs: int
    """Runs that are not in the ledger; a run that several cells need is one."""
    core_minutes: float

    def text(self, jobs: int) -> str:
        """One sentence, before the runs begin."""
        minutes = self.core_minutes / jobs
        return f"{self.num_runs} runs to do: some {max(1, round(minutes))} minutes with --jobs {jobs}."


def estimate(cells: Iterable[ComparisonCell], ledger: Ledger, *, typical_run_s: float = TYPICAL_RUN_S) -> Estimate:
    """Return what is left to run, at the mean duration of what the ledger has of a family, else a typical one."""
    tasks = {cell.task.key: cell.task for cell in cells}
    walls_s: dict[str, list[float]] = {}
    for task in tasks.values():
        if (outcome := ledger.get(task)) is not None:
            walls_s.setdefault(task.scenario.family, []).append(outcome.wall_s)
    missing = [task for task in tasks.values() if task not in ledger]
    means = {family: statistics.fmean(walls) for family, walls in walls_s.items()}
    return Estimate(len(missing), sum(means.get(task.scenario.family, typical_run_s) for task in missing) / 60)


class Forecast:
    """Wall-clock time left: the runs that are left, at the mean duration of the runs so far in the same family."""

    def __init__(self, tasks: Iterable[RunTask], jobs: int) -> None:
        self._jobs = jobs
        self._left = Counter(task.scenario.family for task in tasks)
        self._walls_s: dict[str, list[float]] = {}

    def record_run(self, task: RunTask, outcome: RunOutcome) -> None:
        """Count a run that is over."""
        self._left[task.scenario.family] -= 1
        self._walls_s.setdefault(task.scenario.family, []).append(outcome.wall_s)

    def left_s(self) -> float | None:
        """Seconds left; `None` before the first run."""
        if not self._walls_s:
            return None
        means = {family: statistics.fmean(walls) for family, walls in self._walls_s.items()}
        unseen = statistics.fmean(means.values())
        return sum(number * means.get(family, unseen) for family, number in self._left.items()) / self._jobs


def outcomes(tasks: Sequence[RunTask], *, jobs: int, data: Path | None = None) -> Iterator[tuple[RunTask, RunOutcome]]:
    """Run tasks in `jobs` processes and yield each with its outcome as it completes.

    Raises:
        EpisodeError: when an episode raises; the cause is chained.
    """
    with EpisodePool(jobs) as pool:
        for index, outcome in pool.run(partial(run_task, data=data), tasks):
            yield tasks[index], outcome


def run_task(task: RunTask, *, data: Path | None = None) -> RunOutcome:
    """Run one episode in this process."""
    setting = task.setting
    began_s = time.perf_counter()
    episode = run_episode(
        task.ruling_scenario,
        policy_of(setting),
        data=workload_data(task.scenario.workload, data),
        seed=task.seed,
        policy_options=setting.options,
        initial_local_batch_size=task.initial_local_batch_size,
        make_cluster=ClairvoyantCluster if setting.policy == ORACLE else VirtualCluster,
    )
    return RunOutcome(
        time_to_target_s=episode.time_to_target_s,
        accuracy_at_fixed_time=episode.accuracy_at_fixed_time,
        test_accuracy=episode.test_accuracy,
        num_steps=episode.num_steps,
        num_windows=episode.num_windows,
        samples_seen=episode.samples_seen,
        virtual_time_s=episode.virtual_time_s,
        evaluations=[(evaluation.time_s, evaluation.accuracy) for evaluation in episode.evaluations],
        evaluated_samples=[evaluation.samples_seen for evaluation in episode.evaluations],
        wall_s=time.perf_counter() - began_s,
    )


def policy_of(setting: Setting) -> Policy:
    """The policy of a setting, read from its file when it has one; the oracle's actions are dropped."""
    if setting.policy == ORACLE:
        return Static()
    return _learned(setting.policy_file) if setting.policy_file else known_policy(setting.policy)


@lru_cache(maxsize=64)
def _learned(file: str) -> Policy:
    return LearnedPolicy(PolicyFile.read(Path(file)))
