"""Settings of the reward service: `DYNAMIX_REWARD_<FIELD>` or `--field`."""

from typing import Literal

from .formula import Formula, Weights


class RewardSettings(Weights, frozen=True, kw_only=True):
    """The weights of the terms, and which formula they are for."""

    formula: Literal["auto", "paper-sgd", "paper-adam", "time-aware"] = "auto"
    """`auto`: the published formula for each job's optimizer."""

    def chosen_formula(self) -> Formula | None:
        """The formula for every job, or `None` to choose by each job's optimizer."""
        return None if self.formula == "auto" else self.formula
