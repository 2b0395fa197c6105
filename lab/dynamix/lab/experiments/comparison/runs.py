"""One run of a comparison: an episode as a task with an identity, and its outcome as a line of a file.

The identity covers everything that determines the outcome: scenario, seed, policy with its options and file, the code
and the numerical libraries. A ledger keeps outcomes by identity, one line each: a killed evaluation is resumed, and a
changed scenario, policy or program never reuses an old outcome. Its first line says what the file is;
ledgers written before there was such a line begin with an outcome, and are read and continued as they are.
"""

import hashlib
from functools import cached_property
from pathlib import Path
from typing import IO, Self

import msgspec

from dynamix.arbitrator.policies.registry import POLICIES, extension_policy
from dynamix.lab.experiments.episodes.provenance import code_digest, versions
from dynamix.lab.simulator.scenario import Scenario
from dynamix.runtime import output_files
from dynamix.runtime.output_files import RefusedOutputError

from .baselines import LABORATORY
from .contenders import ORACLE, Setting
from .results_file import HEADER, LEDGER

PUBLISHED_LEAST = {"ppo-paper": 32}
"""Samples per worker: the smallest batch that a policy was published with. It is not compared with smaller ones."""


class RunTask(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One episode of a comparison: what determines its outcome."""

    scenario: Scenario
    setting: Setting
    seed: int

    @cached_property
    def key(self) -> str:
        """SHA-256 of everything that determines the outcome."""
        about = {
            "scenario": self.ruling_scenario.content,
            "setting": self.setting.identity(),
            "seed": self.seed,
            "code": code_digest(),
            "versions": versions(),
        }
        if (version := _version(self.setting)) is not None:
            about["policy_version"] = version
        return hashlib.sha256(msgspec.json.encode(about, order="sorted")).hexdigest()

    @property
    def name(self) -> str:
        """Policy, scenario and seed in words, for messages."""
        return f"{self.setting.policy} in scenario {self.scenario.name}, seed {self.seed}"

    @property
    def initial_local_batch_size(self) -> int | None:
        """The size to start with, within the scenario's bounds; `None`: the scenario's own."""
        size = self.setting.initial_local_batch_size
        if size is None:
            return None
        return max(1, self.ruling_scenario.min_local_batch_size, min(size, self.scenario.max_local_batch_size))

    @cached_property
    def ruling_scenario(self) -> Scenario:
        """The scenario with the learning rate, and the rule for it, that the setting asks for.

        So it is with what the job permits of how gradients travel, where the workers can carry out anything else.
        """
        permission = self.setting.exchange if self.scenario.permits_any_exchange else None
        return msgspec.structs.replace(
            self.scenario,
            learning_rate=self.scenario.learning_rate * self.setting.learning_rate_factor,
            learning_rate_rule=self.setting.learning_rate_rule or self.scenario.learning_rate_rule,
            exchange=permission or self.scenario.exchange,
            min_local_batch_size=as_published(self.setting.policy, self.scenario).min_local_batch_size,
        )


def as_published(policy: str, scenario: Scenario) -> Scenario:
    """The scenario with no size below those that the policy was published with, where it starts with such sizes."""
    least = min(PUBLISHED_LEAST.get(policy, 1), scenario.initial_local_batch_size, *scenario.max_local_batch_sizes)
    return msgspec.structs.replace(scenario, min_local_batch_size=max(scenario.min_local_batch_size, least))


class RunOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a run; times in virtual seconds."""

    time_to_target_s: float | None
    """`None`: the target was missed."""
    accuracy_at_fixed_time: float | None
    test_accuracy: float
    num_steps: int
    num_windows: int
    samples_seen: int
    virtual_time_s: float
    evaluations: list[tuple[float, float]] = []
    """(time, accuracy on the validation part)."""
    evaluated_samples: list[int] = []
    """Samples seen by each evaluation."""
    wall_s: float = 0.0
    """Wall-clock duration, for the forecast; never part of a result."""


class LedgerLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the ledger."""

    key: str
    about: str
    """Policy, scenario and seed, for readers."""
    outcome: RunOutcome


class Ledger:
    """Outcomes by identity, in a file: after a kill an incomplete last line is dropped and all others are kept."""

    def __init__(self, path: Path | None = None, *, resume: bool = True) -> None:
        """Read and check `path`, or keep outcomes in memory only. Without `resume` a ledger there becomes *.old.

        Nothing is written, moved or cut off before there is an outcome to add: until then a wrong argument or missing
        data may still end the command.

        Raises:
            RefusedOutputError: when `path`, or what *.old would replace, is anything but a ledger.
        """
        self._outcomes: dict[str, RunOutcome] = {}
        self._file: IO[bytes] | None = None
        self._path = path
        self._resume = resume
        if path is None:
            return
        _check(path, resume=resume)
        if resume:
            self._outcomes, _ = _read(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def __contains__(self, task: RunTask) -> bool:
        return task.key in self._outcomes

    def get(self, task: RunTask) -> RunOutcome | None:
        """Return the outcome of a task, `None` when it was not run."""
        return self._outcomes.get(task.key)

    def record_outcome(self, task: RunTask, outcome: RunOutcome, about: str) -> None:
        """Add an outcome; it is written to the operating system before the return.

        Raises:
            RefusedOutputError: when something else has come to be at the path meanwhile.
            OSError: when the file cannot be written.
        """
        self._outcomes[task.key] = outcome
        if self._path is not None:
            self._file = self._file or _open(self._path, resume=self._resume)
            self._file.write(msgspec.json.encode(LedgerLine(key=task.key, about=about, outcome=outcome)) + b"\n")
            self._file.flush()


def _version(setting: Setting) -> int | None:
    """The version of a policy whose code is not in the digest: another package's, or a baseline of the laboratory."""
    if setting.policy_file or setting.policy in {*POLICIES, ORACLE}:
        return None
    policy = LABORATORY.get(setting.policy) or extension_policy(setting.policy)
    return None if policy is None else policy.version


def _old(path: Path) -> Path:
    return path.with_name(path.name + ".old")


def _check(path: Path, *, resume: bool) -> None:
    output_files.check(path, LEDGER, make_parents=True)
    if not resume and path.exists():
        output_files.check(_old(path), LEDGER)


def _open(path: Path, *, resume: bool) -> IO[bytes]:
    """Open for appending, behind the last whole line."""
    _check(path, resume=resume)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not resume and path.exists():
        path.replace(_old(path))
    _, whole = _read(path)
    file = path.open("ab")
    file.truncate(whole)
    if whole == 0:
        file.write(HEADER)
    return file


def _read(path: Path) -> tuple[dict[str, RunOutcome], int]:
    """The outcomes in a ledger, and where its last whole line ends.

    Raises:
        RefusedOutputError: when the file is not a ledger.
    """
    outcomes: dict[str, RunOutcome] = {}
    end = 0
    for number, text in enumerate(path.read_bytes().splitlines(keepends=True) if path.exists() else (), start=1):
        is_header = number == 1 and HEADER.startswith(text)
        if not text.endswith(b"\n"):  # torn by a kill, when what is before it is ours
            if end == 0 and not is_header:
                raise RefusedOutputError(f"{path} has no whole line of results: name another file, or remove this one")
            break
        if not is_header:
            line = _line(path, number, text)
            outcomes[line.key] = line.outcome
        end += len(text)
    return outcomes, end


def _line(path: Path, number: int, text: bytes) -> LedgerLine:
    try:
        return msgspec.json.decode(text, type=LedgerLine)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        reason = "its values are nested too deeply" if isinstance(error, RecursionError) else error
        raise RefusedOutputError(
            f"{path}, line {number}, is no result ({reason}): name another file, or remove this one"
        ) from error
