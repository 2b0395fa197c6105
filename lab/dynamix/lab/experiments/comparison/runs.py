"""One run of a comparison: an episode as a task with an identity, and its outcome as a line of a file.

The identity covers everything that determines the outcome: scenario, seed, policy with its options and file, the code
and the numerical libraries. A ledger keeps outcomes by identity, one line each, so that a killed evaluation goes on
where it was and a changed scenario, policy or program never meets an old number.
"""

import hashlib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import IO, Self

import msgspec

from dynamix.lab.simulator.scenario import Scenario
from dynamix.recording.provenance import code_digest, versions

from .contenders import Setting


class RunTask(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """An episode to run."""

    scenario: Scenario
    setting: Setting
    seed: int

    @cached_property
    def key(self) -> str:
        """SHA-256 of everything that determines the outcome."""
        about = {
            "scenario": msgspec.to_builtins(self.ruling_scenario),
            "setting": self.setting.identity(),
            "seed": self.seed,
            "code": code_digest(),
            "versions": versions(),
        }
        return hashlib.sha256(msgspec.json.encode(about, order="sorted")).hexdigest()

    @property
    def initial_local_batch_size(self) -> int | None:
        """The size to start with, within the scenario's bounds; `None`: the scenario's own."""
        size = self.setting.initial_local_batch_size
        if size is None:
            return None
        return max(1, self.scenario.min_local_batch_size, min(size, self.scenario.max_local_batch_size))

    @cached_property
    def ruling_scenario(self) -> Scenario:
        """The scenario with the learning-rate rule that the setting asks for."""
        rule = self.setting.learning_rate_rule
        return self.scenario if rule is None else msgspec.structs.replace(self.scenario, learning_rate_rule=rule)


class RunOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a run; times in virtual seconds."""

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
    wall_s: float = 0.0
    """What the run took here; for the forecast, never a result."""


class LedgerLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the ledger."""

    key: str
    about: str
    """For a reader: policy, scenario, seed."""
    outcome: RunOutcome


class Ledger:
    """Outcomes by identity, in a file that a kill cannot spoil: a torn last line is dropped, all others stand."""

    def __init__(self, path: Path | None = None, *, resume: bool = True) -> None:
        """Open `path`; without `resume` an existing file is first renamed to *.old.

        Without a path, or with one that is not a regular file (/dev/null), outcomes are kept in memory only.
        """
        self._outcomes: dict[str, RunOutcome] = {}
        self._file: IO[bytes] | None = None
        if path is None or (path.exists() and not path.is_file()):
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not resume:
            path.replace(path.with_name(path.name + ".old"))
        whole = 0
        for line, end in _lines(path):
            self._outcomes[line.key] = line.outcome
            whole = end
        self._file = path.open("ab")
        self._file.truncate(whole)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def __contains__(self, task: RunTask) -> bool:
        return task.key in self._outcomes

    def get(self, task: RunTask) -> RunOutcome | None:
        """The outcome of a task, when it is known."""
        return self._outcomes.get(task.key)

    def add(self, task: RunTask, outcome: RunOutcome, about: str) -> None:
        """Keep an outcome; on return the operating system has it."""
        self._outcomes[task.key] = outcome
        if self._file is not None:
            self._file.write(msgspec.json.encode(LedgerLine(key=task.key, about=about, outcome=outcome)) + b"\n")
            self._file.flush()


def _lines(path: Path) -> Iterator[tuple[LedgerLine, int]]:
    """The whole lines of a ledger with the position after each.

    Raises:
        ValueError: when the file is not a ledger.
    """
    if not path.exists():
        return
    end = 0
    for number, text in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        if not text.endswith(b"\n"):  # torn by a kill
            return
        end += len(text)
        try:
            yield msgspec.json.decode(text, type=LedgerLine), end
        except msgspec.MsgspecError as error:
            raise ValueError(f"{path}, line {number}: {error}; it is no file of results, name another") from error
