"""The outcomes of a comparison as arrays: policy seeds x scenarios x scenario seeds, NaN where a run is missing."""

from collections.abc import Callable, Sequence

import numpy as np

from dynamix.lab.simulator.scenario import Scenario

from . import scores
from .evaluation import ComparisonCell
from .runs import Ledger, RunOutcome


class OutcomeTable:
    """The outcomes of every contender, selected by family."""

    def __init__(self, scenarios: Sequence[Scenario], cells: Sequence[ComparisonCell], ledger: Ledger) -> None:
        self._scenarios = tuple(scenarios)
        self._seeds = sorted({cell.task.seed for cell in cells})
        self._known: dict[str, list[tuple[ComparisonCell, RunOutcome]]] = {}
        for cell in cells:
            if (outcome := ledger.get(cell.task)) is not None:
                self._known.setdefault(cell.label, []).append((cell, outcome))

    def outcomes(self, label: str, families: Sequence[str]) -> list[RunOutcome]:
        """Return all outcomes of a contender in some families."""
        return [outcome for cell, outcome in self._known.get(label, []) if cell.family in families]

    def num_misses(self, label: str, families: Sequence[str]) -> int:
        """Count the runs that missed the target."""
        return sum(outcome.time_to_target_s is None for outcome in self.outcomes(label, families))

    def times(self, label: str, families: Sequence[str]) -> scores.Array64:
        """Return times to the target in seconds; a miss counts as the time limit."""
        return self._array(
            label,
            families,
            lambda cell, outcome: scores.counted_time_s(outcome.time_to_target_s, cell.task.scenario.time_limit_s),
        )

    def mean(
        self, label: str, families: Sequence[str], number: Callable[[RunOutcome], float | None]
    ) -> scores.MeanInterval | None:
        """Return the mean of a number of each outcome, `None` left out, with its interval over all seeds."""

        def known(_: ComparisonCell, outcome: RunOutcome) -> float:
            found = number(outcome)
            return np.nan if found is None else found

        return scores.crossed_mean(self._array(label, families, known))

    def ratio(self, label: str, base: str, families: Sequence[str]) -> scores.RatioInterval | None:
        """Return the paired ratio of times to another contender, families weighted equally; `None` without a pair."""
        weights = scores.family_weights([scenario.family for scenario in self._of(families)])
        return scores.paired_ratio(self.times(label, families), self.times(base, families)[0], weights)

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
    ) -> scores.Array64:
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
