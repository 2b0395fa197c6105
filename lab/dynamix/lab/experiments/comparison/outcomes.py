"""The outcomes of a comparison, by contender, family, scenario and seed.

Arrays have `P` policy seeds x `C` scenarios x `S` scenario seeds, NaN where a run is missing. A miss counts as the
limit.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from dynamix.lab.simulator.scenario import Scenario

from .contenders import Contender
from .evaluation import ComparisonCell
from .runs import Ledger, RunOutcome
from .scores import Array64, MeanInterval, RatioInterval, crossed_mean, paired_ratio


class OutcomeTable:
    """The outcomes of every contender, selected by family."""

    def __init__(
        self,
        scenarios: Sequence[Scenario],
        cells: Sequence[ComparisonCell],
        ledger: Ledger,
        contenders: Sequence[Contender] = (),
    ) -> None:
        """Take the outcomes in a ledger; `contenders` name the rows that are the best of others."""
        self._scenarios = tuple(scenarios)
        self._seeds = sorted({cell.task.seed for cell in cells})
        self._known: dict[str, list[tuple[ComparisonCell, RunOutcome]]] = {}
        self.chosen: dict[str, dict[str, str]] = {}
        """By the label of a row that is the best of others: which one, by scenario."""
        for cell in cells:
            if (outcome := ledger.get(cell.task)) is not None:
                self._known.setdefault(cell.label, []).append((cell, outcome))
        for contender in contenders:
            if contender.best_of:
                self._choose(contender.label, [part.label for part in contender.best_of])

    def _choose(self, label: str, parts: Sequence[str]) -> None:
        """Make a row of the best other one in each scenario, where every run of all of them is known."""
        chosen = self.chosen[label] = {}
        self._known[label] = []
        for scenario in self._scenarios:
            runs = {part: self._runs_in(scenario, part) for part in parts}
            if not runs[parts[0]] or len({len(found) for found in runs.values()}) > 1:
                continue
            best = min(parts, key=lambda part: sum(math.log(_time_s(*run)) for run in runs[part]))
            chosen[scenario.name] = best
            self._known[label] += runs[best]

    def _runs_in(self, scenario: Scenario, label: str) -> list[tuple[ComparisonCell, RunOutcome]]:
        return [run for run in self._known.get(label, []) if run[0].task.scenario == scenario]

    def outcomes(self, label: str, families: Sequence[str]) -> list[RunOutcome]:
        """Return all outcomes of a contender in some families."""
        return [outcome for cell, outcome in self._known.get(label, []) if cell.family in families]

    def num_misses(self, label: str, families: Sequence[str]) -> int:
        """Count the runs that missed the target."""
        return sum(outcome.time_to_target_s is None for outcome in self.outcomes(label, families))

    def times(self, label: str, families: Sequence[str]) -> Array64:
        """Return times to the target in seconds; a miss counts as the time limit."""
        return self._array(label, families, _time_s)

    def mean(
        self, label: str, families: Sequence[str], number: Callable[[RunOutcome], float | None]
    ) -> MeanInterval | None:
        """Return the mean of a number of each outcome, `None` left out, with its interval over all seeds."""

        def known(_: ComparisonCell, outcome: RunOutcome) -> float:
            found = number(outcome)
            return np.nan if found is None else found

        return crossed_mean(self._array(label, families, known))

    def ratio(self, label: str, base: str, families: Sequence[str]) -> RatioInterval | None:
        """Return the paired ratio of times to another contender, families weighted equally; `None` without a pair."""
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
        """Return the mean validation accuracy after as many samples for all rows, interpolated; `None` if unknown."""
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
        """Return accuracy over virtual time, for each run of a contender in one scenario."""
        return [
            outcome.evaluations for cell, outcome in self._known.get(label, []) if cell.task.scenario.name == scenario
        ]

    def target_accuracy(self, scenario: str) -> float:
        """Return the target accuracy of a scenario."""
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
    """Return the time to the target; the limit for a run that missed it."""
    return time_limit_s if time_to_target_s is None else min(time_to_target_s, time_limit_s)
