"""The verdict of a comparison: one row per contender, per family and over all heterogeneous families."""

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from dynamix.arbitrator.deciding.signatures import spread_signature
from dynamix.arbitrator.learned.policy_file import PolicyFile
from dynamix.lab.experiments.episodes.provenance import code_digest, versions
from dynamix.lab.experiments.episodes.suite import TRAIN, Suite, digest_of, is_control, suite_named
from dynamix.schemas.messages.policies import DEFAULT_POLICY

from .contenders import BASES, BEST_STATIC, GOODPUT, Contender, Setting
from .evaluation import ComparisonCell
from .outcomes import OutcomeTable
from .runs import Ledger
from .scores import RatioInterval, relative_spread
from .tuned import Tuned


class VerdictRow(msgspec.Struct, frozen=True, kw_only=True):
    """One contender; times in virtual seconds, a miss counts as the time limit."""

    policy: str
    median_time_to_target_s: float | None
    """`None`, as the ratios, where nothing was run."""
    misses: int
    vs_best_static: RatioInterval | None
    vs_goodput: RatioInterval | None
    against: dict[str, RatioInterval | None] = {}
    """Ratios to the rows that were asked for, by label."""
    num_runs: int
    num_policy_seeds: int
    accuracy_at_fixed_time: float | None
    """Mean, of the validation part."""
    test_accuracy: float | None
    """Mean; the test part is scored once, at the end of each run."""
    accuracy_at_equal_samples: float | None = None
    """Mean, of the validation part, after as many samples as every run of a scenario was evaluated at."""
    relative_spread: float | None
    """Standard deviation over mean of the times to target within a scenario, averaged over scenarios."""
    signatures: list[str] = []
    """Failure signatures: scenarios in which the runs of this row differ too much from each other."""
    settings: list[dict[str, object]] = []
    """One per policy seed; only in the rows of a family."""
    chosen: dict[str, str] = {}
    """By scenario, which row counts in one that is the best of others; only in the rows of a family."""
    note: str = ""


class VerdictFamily(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of one family."""

    control: bool
    """Identical workers without stragglers or congestion: a control, where no policy can win and none may lose."""
    scenarios: dict[str, str]
    """SHA-256 of the content, by name."""
    best_static_local_batch_size: int | None
    """Chosen on train scenarios."""
    chosen_on: str
    """Train scenarios of the family, or all of them when it has none."""
    policies: list[VerdictRow]
    equal_samples: dict[str, int] = {}
    """By scenario, the samples after which accuracies are compared."""


class HeadlineRow(msgspec.Struct, frozen=True, kw_only=True):
    """The default policy against one row: ratios of the times to target."""

    against: str
    all_families: RatioInterval | None
    """The control among them, each family counted alike."""
    heterogeneous: RatioInterval | None
    control: RatioInterval | None
    """`None`, as the others, where nothing was run."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What `dynamix evaluate --json` writes."""

    suite: str
    default_policy: str
    families: dict[str, VerdictFamily]
    policies: list[VerdictRow]
    """Rows over the heterogeneous families, weighted equally; over all when none is heterogeneous."""
    heterogeneous_families: list[str]
    seeds: list[int]
    num_runs_missing: int
    """Above 0 after an interrupt: rows then use the pairs that exist."""
    command: str
    policy_files: dict[str, list[str]]
    """SHA-256 of each learned policy's files, in the order of policy seeds."""
    tuned_on: str
    """SHA-256 of the train scenarios that the baselines' settings were chosen on."""
    code: str
    versions: dict[str, str]
    headline: list[HeadlineRow] = []
    """The default policy against each of `contenders.BASES` that was run."""
    core_minutes: float = 0.0
    """What the runs took, of one core."""
    against: list[str] = []
    """Rows that all rows were asked to be compared with, beside best static and goodput."""


class VerdictBuilder:
    """Computes a verdict from the outcomes in a ledger."""

    def __init__(
        self,
        suite: Suite,
        contenders: Sequence[Contender],
        cells: Sequence[ComparisonCell],
        ledger: Ledger,
        tuned: Tuned,
        *,
        against: Sequence[str] = (),
    ) -> None:
        """`against` are labels of rows that all are compared with, too."""
        self.suite = suite
        self._compared_with = list(against)
        self.table = OutcomeTable(suite.scenarios, cells, ledger, contenders)
        self._contenders = contenders
        self._cells = cells
        self._num_missing = sum(cell.task not in ledger for cell in cells)
        known = {cell.task.key: ledger.get(cell.task) for cell in cells}
        self._core_s = sum(outcome.wall_s for outcome in known.values() if outcome is not None)
        self._tuned = tuned
        self._notes = {contender.label: note_on(contender, suite) for contender in contenders}

    def verdict(self, command: str) -> Verdict:
        """Return the verdict on all outcomes in the ledger."""
        heterogeneous = self.suite.heterogeneous_families
        some_family = next(iter(self.suite.families))
        return Verdict(
            suite=self.suite.name,
            default_policy=DEFAULT_POLICY,
            families={name: self._family(name) for name in self.suite.families},
            policies=[self._row(row, heterogeneous or list(self.suite.families)) for row in self._contenders],
            heterogeneous_families=heterogeneous,
            seeds=sorted({cell.task.seed for cell in self._cells}),
            num_runs_missing=self._num_missing,
            command=command,
            policy_files={
                row.label: [setting.policy_digest for setting in row.settings(some_family, self._tuned)]
                for row in self._contenders
                if row.is_learned
            },
            tuned_on=self._tuned.scenarios,
            code=code_digest(),
            versions=versions(),
            headline=[self._against(base) for base in BASES if base in self._notes],
            core_minutes=self._core_s / 60,
            against=self._compared_with,
        )

    def _against(self, base: str) -> HeadlineRow:
        """The default policy against a row, where both were run."""
        families = list(self.suite.families)
        heterogeneous = self.suite.heterogeneous_families
        control = [name for name in families if name not in heterogeneous]
        return HeadlineRow(
            against=base,
            all_families=self._default_ratio(base, families),
            heterogeneous=self._default_ratio(base, heterogeneous),
            control=self._default_ratio(base, control),
        )

    def _default_ratio(self, base: str, families: Sequence[str]) -> RatioInterval | None:
        return self.table.ratio(DEFAULT_POLICY, base, families) if families else None

    def _family(self, name: str) -> VerdictFamily:
        scenarios = self.suite.families[name]
        choice = self._tuned.choice("static", name)
        return VerdictFamily(
            control=is_control(scenarios),
            scenarios={scenario.name: digest_of(scenario) for scenario in scenarios},
            best_static_local_batch_size=None if choice is None else choice.initial_local_batch_size,
            chosen_on="all train scenarios" if self._tuned.is_fallback(name) else "train scenarios of the family",
            policies=[self._row(row, [name], row.settings(name, self._tuned)) for row in self._contenders],
            equal_samples=self.table.equal_samples(name),
        )

    def _row(self, contender: Contender, families: Sequence[str], settings: Sequence[Setting] = ()) -> VerdictRow:
        label = contender.label
        outcomes = self.table.outcomes(label, families)
        times = self.table.times(label, families)
        return VerdictRow(
            policy=label,
            median_time_to_target_s=float(np.nanmedian(times)) if outcomes else None,
            misses=self.table.num_misses(label, families),
            vs_best_static=self.table.ratio(label, BEST_STATIC, families),
            vs_goodput=self.table.ratio(label, GOODPUT, families),
            against={base: self.table.ratio(label, base, families) for base in self._compared_with},
            num_runs=len(outcomes),
            num_policy_seeds=times.shape[0] if outcomes else 0,
            accuracy_at_fixed_time=_mean(outcome.accuracy_at_fixed_time for outcome in outcomes),
            test_accuracy=_mean(outcome.test_accuracy for outcome in outcomes),
            accuracy_at_equal_samples=self.table.accuracy_at_equal_samples(label, families),
            relative_spread=relative_spread(times),
            signatures=self._spreads(label, families),
            settings=[setting.identity() for setting in settings],
            chosen=self.table.chosen.get(label, {}) if settings else {},
            note=self._notes[label],
        )

    def _spreads(self, label: str, families: Sequence[str]) -> list[str]:
        """Name the scenarios in which the times of a row spread more than a policy's should."""
        found = []
        for name in families:
            times_PCS = self.table.times(label, [name])
            for place, scenario in enumerate(self.suite.families[name]):
                times = times_PCS[:, place].ravel()
                if (finding := spread_signature(times[~np.isnan(times)].tolist())) is not None:
                    found.append(f"{finding.signature} in {scenario.name}: {finding.explanation}")
        return found


def note_on(contender: Contender, suite: Suite) -> str:
    """Return a caveat on the row of a learned policy: no file, or learned on this suite; else empty."""
    if not contender.is_learned:
        return ""
    if not contender.files:
        return "no policy file comes with the package"
    known = scenarios_learned_from(contender.files, suite)
    return f"learned on scenarios of this suite: {', '.join(known)}" if known else ""


def scenarios_learned_from(files: Iterable[str], suite: Suite) -> list[str]:
    """Names of the suite's scenarios that policy files were learned on: a comparison on these proves nothing.

    A file names the train scenarios it learned on. Suites may share a name, so the suite's scenario must also have the
    content of the train scenario.

    Raises:
        PolicyFileError: when a file is not a policy file.
    """
    names = {name for file in files for name in PolicyFile.read(Path(file)).metadata.scenarios}
    train = {scenario.name: digest_of(scenario) for scenario in suite_named(TRAIN).scenarios}
    return [
        scenario.name
        for scenario in suite.scenarios
        if scenario.name in names and train.get(scenario.name) == digest_of(scenario)
    ]


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
