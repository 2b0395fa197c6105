"""What became of each trial, in memory or also in a file, so that a measurement that was cut off goes on."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
from bench.failover.trial import Fault, Trial
from bench.harness.command import BenchmarkError

from dynamix.runtime import output_files
from dynamix.runtime.output_files import FileKind

KEPT = FileKind("trials of bench.failover", lambda head: head.startswith(b'{"number":'))


class TrialOutcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One trial, or why it could not be ended."""

    number: int
    """From 0, of each fault."""
    fault: Fault
    trial: Trial | None = None
    failed: str = ""


class KeptOutcomes:
    """The outcomes of a plan; with a file those that it has are not run again, failed ones neither."""

    def __init__(self, faults: Sequence[Fault], num_trials: int, path: Path | None = None) -> None:
        """Read the file. Raises BenchmarkError when it has a line that is no outcome."""
        self.plan = [(number, fault) for number in range(num_trials) for fault in faults]
        self._path = path
        self._outcomes: dict[tuple[int, Fault], TrialOutcome] = {}
        for at, line in enumerate(path.read_bytes().splitlines() if path is not None and path.exists() else (), 1):
            try:
                outcome = msgspec.json.decode(line, type=TrialOutcome)
            except msgspec.MsgspecError as error:
                raise BenchmarkError(f"{path}, line {at}, is no trial: {error}; name another file") from None
            self._outcomes[outcome.number, outcome.fault] = outcome

    def add_outcome(self, outcome: TrialOutcome) -> None:
        """Keep what became of a trial."""
        self._outcomes[outcome.number, outcome.fault] = outcome
        if self._path is not None:
            lines = [msgspec.json.encode(one) + b"\n" for one in self._outcomes.values()]
            output_files.write(self._path, b"".join(lines), make_parents=True)

    @property
    def missing(self) -> list[tuple[int, Fault]]:
        """The trials of the plan that are to be run."""
        return [one for one in self.plan if one not in self._outcomes]

    @property
    def trials(self) -> list[Trial]:
        """Those of the plan that were judged, in its order."""
        found = (self._outcomes.get(one) for one in self.plan)
        return [outcome.trial for outcome in found if outcome is not None and outcome.trial is not None]

    @property
    def failures(self) -> list[str]:
        """Why others could not be ended."""
        found = (self._outcomes.get(one) for one in self.plan)
        return [f"{one.fault}, trial {one.number + 1}: {one.failed}" for one in found if one is not None and one.failed]
