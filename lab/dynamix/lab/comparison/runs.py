"""The runs of a comparison: which episodes it needs, their execution, and a ledger of outcomes.

A run is known by everything that determines its outcome: scenario, seed, policy with its options and file, the code and
the numerical libraries. The ledger keeps outcomes by this key, one line each: a killed evaluation is resumed, and a
changed scenario, policy or program never reuses an old outcome.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import IO, NamedTuple, Self, get_args

import msgspec

from dynamix.arbitrator.learned.policy import LearnedPolicy
from dynamix.arbitrator.learned.policy_store import read_policy_file
from dynamix.arbitrator.policies.baselines import Static
from dynamix.arbitrator.policies.policy import Policy
from dynamix.arbitrator.policies.registry import POLICIES, extension_policy
from dynamix.lab.simulator.cluster import ClairvoyantCluster, VirtualCluster
from dynamix.lab.simulator.episode import (
    RunOutcome,
    code_digest,
    run_episode,
    run_episodes,
    versions,
    workload_data,
)
from dynamix.lab.simulator.scenario import Scenario, Suite
from dynamix.runtime import output_files
from dynamix.runtime.output_files import RefusedOutputError
from dynamix.schemas.messages.allocation import ExchangePermission, is_permitted
from dynamix.schemas.policies import initial_exchange

from . import HEADER, LEDGER
from .rows import LABORATORY, ORACLE, Row, Tuned, known_policy

PUBLISHED_LEAST = {"ppo-paper": 32}
"""Samples per rank: the smallest batch with which a policy was published. It is not compared with smaller ones."""


class RunTask(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One episode of a comparison: what determines its outcome."""

    scenario: Scenario
    setting: Row
    seed: int

    @cached_property
    def key(self) -> str:
        """SHA-256 of everything that determines the outcome."""
        about = {
            "scenario": self.effective_scenario,
            "setting": self.setting.identity(),
            "seed": self.seed,
            "code": code_digest(),
            "versions": versions(),
        }
        name = self.setting.policy
        if not self.setting.files and name not in {*POLICIES, ORACLE}:  # its code is not in the digest
            policy = LABORATORY.get(name) or extension_policy(name)
            about |= {} if policy is None else {"policy_version": policy.version}
        return hashlib.sha256(msgspec.json.encode(about, order="sorted")).hexdigest()

    @property
    def name(self) -> str:
        """Policy, scenario and seed, for messages."""
        return f"{self.setting.policy} in scenario {self.scenario.name}, seed {self.seed}"

    @property
    def initial_local_batch_size(self) -> int | None:
        """Initial size within the scenario's bounds; `None`: the scenario's."""
        size = self.setting.local_batch_size
        if size is None:
            return None
        return max(1, self.effective_scenario.min_local_batch_size, min(size, self.scenario.max_local_batch_size))

    @cached_property
    def effective_scenario(self) -> Scenario:
        """The scenario with the setting's learning rate, its rule, and the permission where workers support it."""
        factor = self.setting.learning_rate_factor
        assert not isinstance(factor, str), "a row that is the best of several is not run itself"
        permission = self.setting.exchange if self.scenario.permits_any_exchange else None
        return msgspec.structs.replace(
            self.scenario,
            learning_rate=self.scenario.learning_rate * factor,
            exchange=permission or self.scenario.exchange,
            min_local_batch_size=as_published(self.setting.policy, self.scenario).min_local_batch_size,
        )


def as_published(policy: str, scenario: Scenario) -> Scenario:
    """The scenario with no size below those with which the policy was published, where it starts with such sizes."""
    least = min(PUBLISHED_LEAST.get(policy, 1), scenario.initial_local_batch_size, *scenario.max_local_batch_sizes)
    return msgspec.structs.replace(scenario, min_local_batch_size=max(scenario.min_local_batch_size, least))


class LedgerLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the ledger."""

    key: str
    about: str
    """Policy, scenario and seed, for readers."""
    outcome: RunOutcome


class Ledger:
    """Outcomes by key, in a file: after a kill an incomplete last line is dropped and all others are kept."""

    def __init__(self, path: Path | None = None) -> None:
        """Read and check `path`, or keep outcomes in memory only.

        Nothing is written or cut off before there is an outcome to add: until then a wrong argument or missing data may
        still end the command.

        Raises:
            RefusedOutputError: when `path` is anything but a ledger.
        """
        self._outcomes: dict[str, RunOutcome] = {}
        self._end = 0
        """End of the last whole line in the file."""
        self._file: IO[bytes] | None = None
        self._path = path
        if path is not None:
            output_files.check(path, LEDGER, make_parents=True)
            content = path.read_bytes() if path.exists() else b""
            for number, text in enumerate(content.splitlines(keepends=True), start=1):
                if not text.endswith(b"\n"):  # cut off by a kill
                    break
                self._end += len(text)
                if number == 1:
                    continue
                try:
                    line = msgspec.json.decode(text, type=LedgerLine)
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                    raise RefusedOutputError(
                        f"{path}, line {number}, is not a result ({error}): name another file, or remove this one"
                    ) from error
                self._outcomes[line.key] = line.outcome

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def __contains__(self, task: RunTask) -> bool:
        return task.key in self._outcomes

    def get(self, task: RunTask) -> RunOutcome | None:
        """The outcome of a task, `None` when it was not run."""
        return self._outcomes.get(task.key)

    def record_outcome(self, task: RunTask, outcome: RunOutcome, about: str) -> None:
        """Add an outcome; it is written to the operating system before the return.

        Raises:
            OSError: when the file cannot be written.
        """
        self._outcomes[task.key] = outcome
        if self._path is None:
            return
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab")
            self._file.truncate(self._end)  # behind the last whole line
            if self._end == 0:
                self._file.write(HEADER)
        self._file.write(msgspec.json.encode(LedgerLine(key=task.key, about=about, outcome=outcome)) + b"\n")
        self._file.flush()


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


def plan(suite: Suite, rows: Sequence[Row], seeds: Sequence[int], tuned: Tuned) -> list[ComparisonCell]:
    """Every cell of a comparison: rows, policy seeds, scenarios and seeds, in the order to run them.

    A row that is the best of others has no cells itself; theirs are run. All rows of a seed come before the next seed,
    so that an interrupted comparison is complete for the first seeds. Each scenario seed is run under one policy seed,
    in turn: as many runs per row as for a policy that is not learned. The interval then covers 99 % instead of 95 %
    (simulated, 5 x 12 seeds).

    Raises:
        ValueError: when a row lacks what it needs, or asks for what a job does not permit.
    """
    parts = {part.label: part for row in rows for part in row.best_of or (row,)}
    settings = {
        (label, family): part.settings(family, tuned) for label, part in parts.items() for family in suite.families
    }
    cells = [
        ComparisonCell(label, index, RunTask(scenario=scenario, setting=setting, seed=seed))
        for turn, seed in enumerate(seeds)
        for scenario in suite.scenarios
        for label in parts
        for index, setting in enumerate(settings[label, scenario.family])
        if index == turn % len(settings[label, scenario.family])
    ]
    for cell in cells:
        if cell.task.seed != seeds[0]:
            continue
        setting, scenario = cell.task.setting, cell.task.effective_scenario
        first = initial_exchange(setting.policy, setting.options)
        if not is_permitted(first, scenario.exchange):
            needed = next(each for each in get_args(ExchangePermission) if is_permitted(first, each))
            how = f"use --exchange {needed}, or set exchange of the row to {needed!r}"
            raise ValueError(
                f"policy {cell.label!r} needs {first.label}, which scenario {scenario.name} does not permit: "
                + (how if scenario.permits_any_exchange else "leave the row out")
            )
    return cells


OnProgress = Callable[[int, int, str], None]
"""Called after each run with the number of runs done, of all runs, and the newest one in words."""


def fill(
    cells: Iterable[ComparisonCell],
    ledger: Ledger,
    *,
    jobs: int = 1,
    data: Path | None = None,
    on_progress: OnProgress | None = None,
) -> None:
    """Run the cells whose outcome is not in the ledger; a run that several cells need is run once.

    Raises:
        EpisodeError: when an episode raises. Outcomes before it are in the ledger.
    """
    needed = {cell.task.key: cell for cell in cells}
    missing = [cell for cell in needed.values() if cell.task not in ledger]
    tasks = [cell.task for cell in missing]
    with closing(run_episodes(partial(run_task, data=data), tasks, jobs=jobs)) as runs:
        for number, (index, outcome) in enumerate(runs, start=len(needed) - len(missing) + 1):
            about = missing[index].about
            ledger.record_outcome(tasks[index], outcome, about)
            if on_progress is not None:
                on_progress(number, len(needed), about)


def run_task(task: RunTask, *, data: Path | None = None) -> RunOutcome:
    """Run one episode in this process."""
    setting = task.setting
    began_s = time.perf_counter()
    episode = run_episode(
        task.effective_scenario,
        policy_of(setting),
        data=workload_data(task.scenario.workload, data),
        seed=task.seed,
        policy_options=setting.options,
        initial_local_batch_size=task.initial_local_batch_size,
        make_cluster=ClairvoyantCluster if setting.policy == ORACLE else VirtualCluster,
    )
    outcome = msgspec.convert(episode, RunOutcome, from_attributes=True)
    return msgspec.structs.replace(outcome, wall_s=time.perf_counter() - began_s)


def policy_of(setting: Row) -> Policy:
    """The policy of a setting, read from its file when it has one; the oracle ignores actions."""
    if setting.policy == ORACLE:
        return Static()
    return _learned(setting.files[0]) if setting.files else known_policy(setting.policy)


@lru_cache(maxsize=64)
def _learned(file: str) -> Policy:
    return LearnedPolicy(read_policy_file(Path(file)))
