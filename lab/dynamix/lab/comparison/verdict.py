"""Statistics of an evaluation: times to a target, paired ratios, their geometric mean and its interval.

Arrays have `P` policy seeds x `C` scenarios x `S` scenario seeds, NaN where a run is missing (`outcomes`).

The interval is a percentile bootstrap over policy seeds AND scenario seeds: each is drawn with
replacement, independently (the pigeonhole bootstrap: Owen, Annals of Applied Statistics 1, 2007); scenarios are fixed.
A second one, where there are several families, also draws families, and scenarios within each: it is about clusters
like these, the first about these clusters.
One draw of seeds serves all scenarios, since a seed is the same model and order of data in all of them. With a dozen
seeds plain percentiles are too narrow, so they are expanded as Hesterberg proposes (American Statistician 69, 2015),
with the number of draws that Satterthwaite's formula gives for the sources together. `scipy.stats.bootstrap` has
neither the crossed axes nor the expansion.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
from scipy.special import ndtr, stdtrit  # scipy.stats.norm.cdf and scipy.stats.t.ppf, without a second of import

from dynamix.arbitrator.deciding.signatures import spread_signature
from dynamix.arbitrator.learned.policy_file import PolicyFile
from dynamix.lab.simulator.episode import code_digest, versions
from dynamix.lab.simulator.scenario import TRAIN, Scenario, Suite, digest_of, is_control, suite_named
from dynamix.schemas.policies import DEFAULT_POLICY

from .rows import BASES, BEST_STATIC, GOODPUT, Row, Tuned, file_digest
from .runs import ComparisonCell, Ledger, RunOutcome

Array64 = npt.NDArray[np.float64]

CONFIDENCE = 0.95
NUM_RESAMPLES = 4000
_RESAMPLE_SEED = 20_240_601
"""Fixed: the same results give the same interval, always."""


class RatioInterval(msgspec.Struct, frozen=True):
    """Geometric mean of paired ratios of time to target, with its 95 % interval; below 1 is faster."""

    ratio: float
    low: float | None
    """`None` where there is only one seed: the spread is unknown."""
    high: float | None
    family_low: float | None = None
    """95 % interval with families as a sample of those there could be; `None` with less than two families or seeds."""
    family_high: float | None = None


class MeanInterval(msgspec.Struct, frozen=True):
    """A mean with its 95 % interval."""

    value: float
    low: float | None
    """`None` where there is only one seed: the spread is unknown."""
    high: float | None


def relative_spread(times_PCS: Array64) -> float | None:
    """Standard deviation over mean of the times in a scenario, averaged; `None` below two runs each."""
    known_C = (scenario[~np.isnan(scenario)] for scenario in np.moveaxis(times_PCS, 1, 0))
    spreads = [np.std(times, ddof=1) / times.mean() for times in known_C if times.size > 1]
    return float(np.mean(spreads)) if spreads else None


def paired_ratio(
    times_PCS: Array64, base_CS: Array64, *, families: Sequence[str] | None = None
) -> RatioInterval | None:
    """The geometric mean ratio of a row's times to a baseline's, paired by scenario and seed.

    Args:
        times_PCS: the row's counted times, NaN where a run is missing.
        base_CS: the baseline's counted times.
        families: the family of each scenario: each family counts alike, and so does each scenario within it. When not
            given, all scenarios are one family.

    Returns:
        `None` when no pair is complete.
    """
    logs_PCS = np.log(times_PCS) - np.log(base_CS)[None]
    known_P, known_C, known_S = (~np.isnan(logs_PCS).all(axis=axes) for axes in ((1, 2), (0, 2), (0, 1)))
    if not known_S.any():
        return None
    logs_PCS = logs_PCS[np.ix_(known_P, known_C, known_S)]
    all_families = [""] * len(known_C) if families is None else families
    weights = family_weights(list(all_families))[known_C]
    own_families = [family for family, is_known in zip(all_families, known_C.tolist(), strict=True) if is_known]
    num_P, _, num_S = logs_PCS.shape
    (center,) = _means(logs_PCS, weights[None], np.ones((1, num_P)), np.ones((1, num_S)))
    return RatioInterval(float(np.exp(center)), *_intervals(logs_PCS, weights, own_families))


def crossed_mean(values_PCS: Array64) -> MeanInterval | None:
    """The mean with Student's interval for policy seeds crossed with scenario seeds; `None` without a value.

    Runs that share a policy or a seed are not independent: the variance is that of the means per policy seed plus that
    of the means per scenario seed, its degrees of freedom are Satterthwaite's. Scenarios are fixed.
    """
    known = ~np.isnan(values_PCS)
    if not known.any():
        return None
    known_P, known_C, known_S = (known.any(axis=axes) for axes in ((1, 2), (0, 2), (0, 1)))
    values_PCS = values_PCS[np.ix_(known_P, known_C, known_S)]
    mean = float(np.nanmean(np.nanmean(values_PCS, axis=(0, 2))))
    if values_PCS.shape[2] == 1:
        return MeanInterval(mean, None, None)
    variance = sum(variance for variance, _ in _variances(values_PCS))
    half = float(stdtrit(_effective_draws(_variances(values_PCS)) - 1, (1 + CONFIDENCE) / 2)) * math.sqrt(variance)
    return MeanInterval(mean, mean - half, mean + half)


def family_weights(families: list[str]) -> Array64:
    """Weights of scenarios, given their families, by which all families count equally; they sum to 1."""
    counts = {family: families.count(family) for family in families}
    return np.array([1 / (len(counts) * counts[family]) for family in families])


def expanded_tail(num_draws: float, confidence: float = CONFIDENCE) -> float:
    """The share of resamples to leave out at each end: below (1 - confidence) / 2 for few draws.

    Phi(-sqrt(n / (n - 1)) t(n - 1)), Hesterberg's equation for the expanded percentile interval.
    """
    return float(ndtr(-math.sqrt(num_draws / (num_draws - 1)) * stdtrit(num_draws - 1, (1 + confidence) / 2)))


def _intervals(
    logs_PCS: Array64, weights_C: Array64, families: Sequence[str]
) -> tuple[float | None, float | None, float | None, float | None]:
    """The interval over seeds, and the one with families drawn, too, and scenarios within each family."""
    num_P, _, num_S = logs_PCS.shape
    if num_S == 1:
        return None, None, None, None
    generator = np.random.default_rng(_RESAMPLE_SEED)

    def multiplicities(number: int) -> Array64:
        """How often each of `number` was drawn, per resample."""
        return generator.multinomial(number, np.full(number, 1 / number), size=NUM_RESAMPLES).astype(np.float64)

    def interval(weights_BC: Array64, variances: Sequence[tuple[float, int]]) -> tuple[float, float]:
        tail = expanded_tail(_effective_draws(variances))
        low, high = np.nanquantile(_means(logs_PCS, weights_BC, counts_BP, counts_BS), (tail, 1 - tail))
        return float(np.exp(low)), float(np.exp(high))

    counts_BP, counts_BS = multiplicities(num_P), multiplicities(num_S)
    over_seeds, names = interval(weights_C[None], _variances(logs_PCS)), sorted(set(families))
    if len(names) == 1:
        return *over_seeds, None, None
    weights_BC = np.zeros((NUM_RESAMPLES, len(families)))
    for name, counts_B in zip(names, multiplicities(len(names)).T, strict=True):
        own_C = [place for place, family in enumerate(families) if family == name]
        weights_BC[:, own_C] = counts_B[:, None] * multiplicities(len(own_C)) / len(own_C)
    means_C = np.nanmean(logs_PCS, axis=(0, 2))
    means = [
        np.mean([mean for mean, own in zip(means_C, families, strict=True) if own == name]) for name in set(families)
    ]
    of_families = float(np.var(means, ddof=1)) / len(means), len(means)
    return *over_seeds, *interval(weights_BC, [*_variances(logs_PCS), of_families])


def _effective_draws(pairs: Sequence[tuple[float, int]]) -> float:
    """The number of draws behind a mean's variance, by Satterthwaite's formula over its sources."""
    total = sum(variance for variance, _ in pairs)
    if total == 0:  # no spread at all: any tail gives the same interval
        return float(max(size for _, size in pairs))
    degrees = total**2 / sum(variance**2 / (size - 1) for variance, size in pairs)
    return 1 + degrees


def _variances(values_PCS: Array64) -> list[tuple[float, int]]:
    """The variances of the mean by policy seeds and by scenario seeds, each with the number of seeds."""
    centred = values_PCS - np.nanmean(values_PCS, axis=(0, 2), keepdims=True)
    marginal = (np.nanmean(centred, axis=(1, 2)), np.nanmean(centred, axis=(0, 1)))
    return [(float(np.var(means, ddof=1)) / means.size, means.size) for means in marginal if means.size > 1]


def _means(logs_PCS: Array64, weights_BC: Array64, counts_BP: Array64, counts_BS: Array64) -> Array64:
    """Per resample the weighted mean over scenarios of their mean log ratios; NaN without a run.

    One row of weights serves all resamples.
    """
    known = ~np.isnan(logs_PCS)
    sums_BC = np.einsum("bp,pcs,bs->bc", counts_BP, np.where(known, logs_PCS, 0.0), counts_BS, optimize=True)
    runs_BC = np.einsum("bp,pcs,bs->bc", counts_BP, known.astype(np.float64), counts_BS, optimize=True)
    weights_BC = np.where(runs_BC > 0, weights_BC, 0.0)
    means_BC = np.divide(sums_BC, runs_BC, out=np.zeros_like(sums_BC), where=runs_BC > 0)
    total_B = weights_BC.sum(axis=1)
    weighted_B = (weights_BC * means_BC).sum(axis=1)
    means_B: Array64 = np.divide(weighted_B, total_B, out=np.full_like(total_B, np.nan), where=total_B > 0)
    return means_B


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
        """By the label of a row that is the best of others: which one, by scenario."""
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
    ) -> MeanInterval | None:
        """The mean of a number of each outcome, `None` left out, with its interval over all seeds."""

        def known(_: ComparisonCell, outcome: RunOutcome) -> float:
            found = number(outcome)
            return np.nan if found is None else found

        return crossed_mean(self._array(label, families, known))

    def ratio(self, label: str, base: str, families: Sequence[str]) -> RatioInterval | None:
        """The paired ratio of times to another row, families weighted equally; `None` without a pair."""
        names = [scenario.family for scenario in self._of(families)]
        return paired_ratio(self.times(label, families), self.times(base, families)[0], families=names)

    def equal_samples(self, family: str) -> dict[str, int]:
        """Return, by scenario, the most samples that every run has been evaluated at: where accuracies are compared."""
        most: dict[str, int] = {}
        for runs in self._known.values():
            for cell, outcome in runs:
                if cell.family == family and outcome.evaluated_samples:
                    name, seen = cell.task.scenario.name, outcome.evaluated_samples[-1]
                    most[name] = min(most.get(name, seen), seen)
        return most

    def accuracy_at_equal_samples(self, label: str, families: Sequence[str]) -> float | None:
        """The mean validation accuracy after as many samples for all rows, interpolated; `None` if unknown."""
        found = []
        for family in families:
            samples = self.equal_samples(family)
            for cell, outcome in self._known.get(label, []):
                if cell.family == family and outcome.evaluated_samples:
                    accuracies = [accuracy for _, accuracy in outcome.evaluations]
                    found.append(
                        float(np.interp(samples[cell.task.scenario.name], outcome.evaluated_samples, accuracies))
                    )
        return float(np.mean(found)) if found else None

    def curves(self, label: str, scenario: str) -> list[list[tuple[float, float]]]:
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
    return counted_time_s(outcome.time_to_target_s, cell.task.scenario.time_limit_s)


def counted_time_s(time_to_target_s: float | None, time_limit_s: float) -> float:
    """The time to the target; the limit for a run that missed it."""
    return time_limit_s if time_to_target_s is None else min(time_to_target_s, time_limit_s)


class VerdictRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row; times in virtual seconds, a miss counts as the time limit."""

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
    headline: list[HeadlineRow] = []
    """The default policy against each of `rows.BASES` that was run."""
    core_minutes: float = 0.0
    """Duration of the runs, of one core."""
    against: list[str] = []
    """Rows that all rows were asked to be compared with, beside best static and goodput."""


class VerdictBuilder:
    """Computes a verdict from the outcomes in a ledger."""

    def __init__(
        self,
        suite: Suite,
        rows: Sequence[Row],
        cells: Sequence[ComparisonCell],
        ledger: Ledger,
        tuned: Tuned,
        *,
        against: Sequence[str] = (),
    ) -> None:
        """`against` are labels of rows that all are compared with, too."""
        self.suite = suite
        self._compared_with = list(against)
        self.table = OutcomeTable(suite.scenarios, cells, ledger, rows)
        self._rows = rows
        self._cells = cells
        self._num_missing = sum(cell.task not in ledger for cell in cells)
        known = {cell.task.key: ledger.get(cell.task) for cell in cells}
        self._core_s = sum(outcome.wall_s for outcome in known.values() if outcome is not None)
        self._tuned = tuned
        self._notes = {row.label: note_on(row, suite) for row in rows}

    def verdict(self, command: str) -> Verdict:
        """The verdict on all outcomes in the ledger."""
        heterogeneous = self.suite.heterogeneous_families
        some_family = next(iter(self.suite.families))
        return Verdict(
            suite=self.suite.name,
            default_policy=DEFAULT_POLICY,
            families={name: self._family(name) for name in self.suite.families},
            policies=[self._row(row, heterogeneous or list(self.suite.families)) for row in self._rows],
            heterogeneous_families=heterogeneous,
            seeds=sorted({cell.task.seed for cell in self._cells}),
            num_runs_missing=self._num_missing,
            command=command,
            policy_files={
                row.label: [file_digest(setting.files[0]) for setting in row.settings(some_family, self._tuned)]
                for row in self._rows
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
        families, heterogeneous = list(self.suite.families), self.suite.heterogeneous_families
        parts = families, heterogeneous, [name for name in families if name not in heterogeneous]
        ratios = (self.table.ratio(DEFAULT_POLICY, base, part) if part else None for part in parts)
        return HeadlineRow(against=base, **dict(zip(("all_families", "heterogeneous", "control"), ratios, strict=True)))

    def _family(self, name: str) -> VerdictFamily:
        scenarios = self.suite.families[name]
        choice = self._tuned.choice("static", name)
        return VerdictFamily(
            control=is_control(scenarios),
            scenarios={scenario.name: digest_of(scenario) for scenario in scenarios},
            best_static_local_batch_size=None if choice is None else choice.initial_local_batch_size,
            chosen_on="all train scenarios" if self._tuned.is_fallback(name) else "train scenarios of the family",
            policies=[self._row(row, [name], row.settings(name, self._tuned)) for row in self._rows],
            equal_samples=self.table.equal_samples(name),
        )

    def _row(self, row: Row, families: Sequence[str], settings: Sequence[Row] = ()) -> VerdictRow:
        label = row.label
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


def note_on(row: Row, suite: Suite) -> str:
    """A caveat on the row of a learned policy: no file, or learned on this suite; else empty."""
    if not row.is_learned:
        return ""
    if not row.policy_files:
        return "no policy file comes with the package"
    known = scenarios_learned_from(row.policy_files, suite)
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
