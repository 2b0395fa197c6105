"""Statistics of an evaluation: times to a target, paired ratios, their geometric mean and its interval.

Arrays have `P` policy seeds x `C` scenarios x `S` scenario seeds, NaN where a run is missing.

Runs that share a policy seed or a scenario seed are not independent. So the variance of a mean is that of the means per
policy seed plus that of the means per scenario seed, and Student's interval has Satterthwaite's degrees of freedom for
that sum. A seed is the same model and order of data in all scenarios; scenarios are fixed. A second interval, where
there are several families, adds the variance between families: it is about clusters like these, the first about these.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np
from scipy.special import stdtrit  # scipy.stats.t.ppf, without a second of import

from dynamix.arbitrator.deciding.signatures import spread_signature
from dynamix.arbitrator.learned.policy_store import read_policy_file
from dynamix.lab.simulator.cluster import Evaluation
from dynamix.lab.simulator.episode import RunOutcome, code_digest, versions
from dynamix.lab.simulator.exchange import Array64
from dynamix.lab.simulator.scenario import TRAIN, Scenario, Suite, digest_of, is_control, suite_named
from dynamix.schemas.policies import DEFAULT_POLICY

from .rows import BASES, BEST_STATIC, GOODPUT, Row, Tuned, file_digest
from .runs import ComparisonCell, Ledger

CONFIDENCE = 0.95


class Interval(msgspec.Struct, frozen=True):
    """A mean with its 95 % interval; of ratios the geometric mean, where below 1 is faster."""

    value: float
    low: float | None = None
    """`None` where there is only one seed: the spread is unknown."""
    high: float | None = None
    family_low: float | None = None
    """95 % interval with families as a sample of those there could be; `None` with less than two families or seeds."""
    family_high: float | None = None

    def exp(self) -> "Interval":
        """That of the numbers whose logarithms have this one."""
        bounds = (self.low, self.high, self.family_low, self.family_high)
        return Interval(math.exp(self.value), *(None if bound is None else math.exp(bound) for bound in bounds))


def mean_interval(values_PCS: Array64, families: Sequence[str] = ()) -> Interval | None:
    """The mean with its intervals; `None` without a value.

    `families` has the family of each scenario: all families count alike, and so do the scenarios within each. By
    default all scenarios are one family.
    """
    is_known = ~np.isnan(values_PCS)
    if not is_known.any():
        return None
    known_P, known_C, known_S = (np.flatnonzero(is_known.any(axis=axes)) for axes in ((1, 2), (0, 2), (0, 1)))
    values_PCS = values_PCS[np.ix_(known_P, known_C, known_S)]
    own = [families[place] if families else "" for place in known_C.tolist()]
    names = sorted(set(own))
    weights_C = np.array([1 / (len(names) * own.count(name)) for name in own])
    means_C = np.nanmean(values_PCS, axis=(0, 2))
    mean = float(weights_C @ means_C)
    if values_PCS.shape[2] == 1:
        return Interval(mean)

    def spread_of(means: Array64) -> tuple[float, int]:
        """Variance of the mean of these, and its degrees of freedom."""
        return float(np.var(means, ddof=1)) / means.size, means.size - 1

    def half(sources: Sequence[tuple[float, int]]) -> float:
        """Half of Student's interval for the sum of the sources' variances, by Satterthwaite's formula."""
        total = sum(variance for variance, _ in sources)
        if total == 0:
            return 0.0
        degrees = total**2 / sum(variance**2 / degrees for variance, degrees in sources)
        return float(stdtrit(degrees, (1 + CONFIDENCE) / 2)) * math.sqrt(total)

    centred_PCS, is_known = values_PCS - means_C[None, :, None], ~np.isnan(values_PCS)
    sources = []
    for axis, scenarios_first in ((2, False), (0, True)):  # by policy seed, and by scenario seed
        counts = np.maximum(is_known.sum(axis=axis), 1)
        means = np.nansum(centred_PCS, axis=axis) / counts
        by_seed = weights_C @ means if scenarios_first else means @ weights_C
        if by_seed.size > 1:
            sources.append(spread_of(by_seed))
    own_half = half(sources)
    if len(names) == 1:
        return Interval(mean, mean - own_half, mean + own_half)
    by_family = np.array([np.mean(means_C[[family == name for family in own]]) for name in names])
    family_half = half([*sources, spread_of(by_family)])
    return Interval(mean, mean - own_half, mean + own_half, mean - family_half, mean + family_half)


def paired_ratio(times_PCS: Array64, base_CS: Array64, families: Sequence[str] = ()) -> Interval | None:
    """The geometric mean ratio of a row's times to a baseline's, paired by scenario and seed; `None` without a pair."""
    found = mean_interval(np.log(times_PCS) - np.log(base_CS)[None], families)
    return None if found is None else found.exp()


class OutcomeTable:
    """The outcomes of every row, selected by family."""

    def __init__(
        self,
        scenarios: Sequence[Scenario],
        cells: Sequence[ComparisonCell],
        ledger: Ledger,
        rows: Sequence[Row] = (),
    ) -> None:
        """Take the outcomes in a ledger; `rows` name the rows that are the best of others."""
        self._scenarios = tuple(scenarios)
        self._seeds = sorted({cell.task.seed for cell in cells})
        self._known: dict[str, list[tuple[ComparisonCell, RunOutcome]]] = {}
        self.chosen: dict[str, dict[str, str]] = {}
        """The chosen rows by scenario, for each row that is the best of others."""
        for cell in cells:
            if (outcome := ledger.get(cell.task)) is not None:
                self._known.setdefault(cell.label, []).append((cell, outcome))
        for row in rows:
            if parts := [part.label for part in row.best_of]:
                self._choose(row.label, parts)

    def _choose(self, label: str, parts: Sequence[str]) -> None:
        """Make a row of the best other one in each scenario, where every run of all of them is known."""
        chosen = self.chosen[label] = {}
        self._known[label] = []
        for scenario in self._scenarios:
            runs = {
                part: [run for run in self._known.get(part, []) if run[0].task.scenario == scenario] for part in parts
            }
            if runs[parts[0]] and len({len(found) for found in runs.values()}) == 1:
                best = min(parts, key=lambda part: sum(math.log(_time_s(*run)) for run in runs[part]))
                chosen[scenario.name] = best
                self._known[label] += runs[best]

    def outcomes(self, label: str, families: Sequence[str]) -> list[RunOutcome]:
        """All outcomes of a row in some families."""
        return [outcome for cell, outcome in self._known.get(label, []) if cell.family in families]

    def num_misses(self, label: str, families: Sequence[str]) -> int:
        """Count the runs that missed the target."""
        return sum(outcome.time_to_target_s is None for outcome in self.outcomes(label, families))

    def times(self, label: str, families: Sequence[str]) -> Array64:
        """Times to the target in seconds; a miss counts as the time limit."""
        return self._array(label, families, _time_s)

    def mean(
        self, label: str, families: Sequence[str], number: Callable[[RunOutcome], float | None]
    ) -> Interval | None:
        """The mean of a number of each outcome, `None` left out, with its interval over all seeds."""

        def known(_: ComparisonCell, outcome: RunOutcome) -> float:
            found = number(outcome)
            return np.nan if found is None else found

        return mean_interval(self._array(label, families, known))

    def ratio(self, label: str, base: str, families: Sequence[str]) -> Interval | None:
        """The paired ratio of times to another row, families weighted equally; `None` without a pair."""
        names = [scenario.family for scenario in self._of(families)]
        return paired_ratio(self.times(label, families), self.times(base, families)[0], names)

    def curves(self, label: str, scenario: str) -> list[list[Evaluation]]:
        """Accuracy over virtual time, for each run of a row in one scenario."""
        return [
            outcome.evaluations for cell, outcome in self._known.get(label, []) if cell.task.scenario.name == scenario
        ]

    def target_accuracy(self, scenario: str) -> float:
        """The target accuracy of a scenario."""
        return next(found.target_accuracy for found in self._scenarios if found.name == scenario)

    def _array(
        self, label: str, families: Sequence[str], number: Callable[[ComparisonCell, RunOutcome], float]
    ) -> Array64:
        known = [(cell, outcome) for cell, outcome in self._known.get(label, []) if cell.family in families]
        places = {scenario.name: place for place, scenario in enumerate(self._of(families))}
        num_policy_seeds = 1 + max((cell.policy_seed for cell, _ in known), default=0)
        array = np.full((num_policy_seeds, len(places), len(self._seeds)), np.nan)
        for cell, outcome in known:
            place = cell.policy_seed, places[cell.task.scenario.name], self._seeds.index(cell.task.seed)
            array[place] = number(cell, outcome)
        return array

    def _of(self, families: Sequence[str]) -> list[Scenario]:
        return [scenario for scenario in self._scenarios if scenario.family in families]


def _time_s(cell: ComparisonCell, outcome: RunOutcome) -> float:
    """The time to the target; the limit for a run that missed it."""
    limit_s = cell.task.scenario.time_limit_s
    return limit_s if outcome.time_to_target_s is None else min(outcome.time_to_target_s, limit_s)


class VerdictRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row; times in virtual seconds, a miss counts as the time limit."""

    policy: str
    median_time_to_target_s: float | None
    """`None`, as the ratios, where nothing was run."""
    misses: int
    ratios: dict[str, Interval | None]
    """To best static, goodput and the requested rows, by label."""
    num_runs: int
    num_policy_seeds: int
    accuracy_at_fixed_time: float | None
    """Mean, of the validation part."""
    test_accuracy: float | None
    """Mean; the test part is scored once, at the end of each run."""
    signatures: list[str] = []
    """Failure signatures: scenarios in which the runs of this row differ too much from each other."""
    settings: list[dict[str, object]] = []
    """Settings, one per policy seed; only in the rows of a family."""
    chosen: dict[str, str] = {}
    """The chosen row by scenario, in one that is the best of others; only in the rows of a family."""
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


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The result that `dynamix evaluate --json` writes."""

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
    headline: dict[str, dict[str, Interval | None]] = {}
    """Ratios of the default policy to each of `rows.BASES` that was run: over all families, the control among them and
    each counted alike, over the heterogeneous ones, and over the control."""
    against: list[str] = []
    """Rows that all rows were asked to be compared with, beside best static and goodput."""


def judge(
    suite: Suite,
    rows: Sequence[Row],
    cells: Sequence[ComparisonCell],
    ledger: Ledger,
    tuned: Tuned,
    *,
    command: str = "",
    against: Sequence[str] = (),
) -> tuple[Verdict, OutcomeTable]:
    """The verdict on all outcomes in a ledger, and these; `against` are labels of rows that all are compared with."""
    table = OutcomeTable(suite.scenarios, cells, ledger, rows)
    families, heterogeneous = list(suite.families), suite.heterogeneous_families
    control = [name for name in families if name not in heterogeneous]
    notes = {row.label: note_on(row, suite) for row in rows}

    def verdict_row(row: Row, places: Sequence[str], settings: Sequence[Row] = ()) -> VerdictRow:
        label = row.label
        outcomes, times = table.outcomes(label, places), table.times(label, places)
        signatures = []
        for name in places:
            times_PCS = table.times(label, [name])
            for place, scenario in enumerate(suite.families[name]):
                own = times_PCS[:, place].ravel()
                if (finding := spread_signature(own[~np.isnan(own)].tolist())) is not None:
                    signatures.append(f"{finding.signature} in {scenario.name}: {finding.explanation}")
        return VerdictRow(
            policy=label,
            median_time_to_target_s=float(np.nanmedian(times)) if outcomes else None,
            misses=table.num_misses(label, places),
            ratios={base: table.ratio(label, base, places) for base in (BEST_STATIC, GOODPUT, *against)},
            num_runs=len(outcomes),
            num_policy_seeds=times.shape[0] if outcomes else 0,
            accuracy_at_fixed_time=_mean(outcome.accuracy_at_fixed_time for outcome in outcomes),
            test_accuracy=_mean(outcome.test_accuracy for outcome in outcomes),
            signatures=signatures,
            settings=[setting.identity() for setting in settings],
            chosen=table.chosen.get(label, {}) if settings else {},
            note=notes[label],
        )

    def verdict_family(name: str) -> VerdictFamily:
        choice, is_own = tuned.choice("static", name), name in tuned.families or not tuned.overall
        return VerdictFamily(
            control=is_control(suite.families[name]),
            scenarios={scenario.name: digest_of(scenario) for scenario in suite.families[name]},
            best_static_local_batch_size=None if choice is None else choice.initial_local_batch_size,
            chosen_on="train scenarios of the family" if is_own else "all train scenarios",
            policies=[verdict_row(row, [name], row.settings(name, tuned)) for row in rows],
        )

    verdict = Verdict(
        suite=suite.name,
        default_policy=DEFAULT_POLICY,
        families={name: verdict_family(name) for name in families},
        policies=[verdict_row(row, heterogeneous or families) for row in rows],
        heterogeneous_families=heterogeneous,
        seeds=sorted({cell.task.seed for cell in cells}),
        num_runs_missing=sum(cell.task not in ledger for cell in cells),
        command=command,
        policy_files={
            row.label: [file_digest(setting.files[0]) for setting in row.settings(families[0], tuned)]
            for row in rows
            if row.is_learned
        },
        tuned_on=tuned.scenarios,
        code=code_digest(),
        versions=versions(),
        headline={
            base: {
                name: table.ratio(DEFAULT_POLICY, base, places) if places else None
                for name, places in (("all families", families), ("heterogeneous", heterogeneous), ("control", control))
            }
            for base in BASES
            if base in notes
        },
        against=list(against),
    )
    return verdict, table


def note_on(row: Row, suite: Suite) -> str:
    """A caveat on the row of a learned policy: no file, or learned on this suite, where it proves nothing; else empty.

    A file names the train scenarios that it was learned on. Suites may share a name, so the suite's scenario must also
    have the content of the train scenario.

    Raises:
        PolicyFileError: when a file is not a policy file.
    """
    if row.is_learned and not row.policy_files:
        return "no policy file comes with the package"
    names = {name for file in row.policy_files for name in read_policy_file(Path(file)).metadata.scenarios}
    train = {digest_of(scenario) for scenario in suite_named(TRAIN).scenarios} if names else set()
    known = [each.name for each in suite.scenarios if each.name in names and digest_of(each) in train]
    return f"learned on scenarios of this suite: {', '.join(known)}" if known else ""


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
