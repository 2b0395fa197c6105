"""`stigmergy`: agents on the nodes leave traces, and the ranks divide each step by them (docs/stigmergy.md).

No arbitrator is needed: this policy decides nothing. With a fixed global batch only the division follows the traces.
"""

from typing import ClassVar

from dynamix.schemas.messages import Job
from dynamix.schemas.messages.allocation import Allocation
from dynamix.schemas.messages.policies import STIGMERGY, STIGMERGY_OPTIONS
from dynamix.schemas.messages.policy_options import OPTION_BOUNDS

from .model.observation import Array32, decided_sizes
from .options import Option, Options
from .policy import Decision

_MEANINGS = {
    "evaporation": "share of a trace's strength that is lost per window; weight of the newest values",
    "diffusion": "share of an appetite that comes from the neighbours",
    "noise_multiplier": "factor on B_noise; above 1, larger batches are preferred",
    "rate_weight": "exponent of lr(B) in the progress of a step",
    "max_change": "greatest factor between the current global batch and an appetite",
    "dead_band": "relative distance from the mean appetite below which the global batch stays",
    "learned": "1: a network chooses a factor on each agent's wish; 0: the wish is the rule's",
}


class Stigmergy:
    """Leaves everything to the traces."""

    name = STIGMERGY
    version = 2
    options: ClassVar[Options] = {
        name: Option(STIGMERGY_OPTIONS[name], bounds.low, bounds.high, _MEANINGS[name], whole=bounds.whole)
        for name, bounds in OPTION_BOUNDS[STIGMERGY].items()
    }

    def decide(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Decision:  # noqa: ARG002 - the protocol's arguments
        """The sizes that the job began with, which rule until there are traces."""
        return Decision(
            Allocation(decided_sizes(obs_WF), "traces"),
            reason="nothing is decided: the traces of the nodes' agents rule",
        )
