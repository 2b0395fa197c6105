"""`stigmergy`: agents on the nodes leave traces, and the ranks divide each step by them (docs/stigmergy.md).

No arbitrator is needed: this policy decides nothing. With a fixed global batch only the division follows the traces.
"""

from typing import ClassVar

from dynamix.schemas.messages import Job
from dynamix.schemas.messages.allocation import Allocation
from dynamix.schemas.policies import POLICY_OPTIONS, STIGMERGY, Options

from .model.observation import Array32, decided_sizes
from .policy import Decision


class Stigmergy:
    """Leaves everything to the traces."""

    name = STIGMERGY
    version = 2
    options: ClassVar[Options] = POLICY_OPTIONS[STIGMERGY]

    def decide(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Decision:  # noqa: ARG002 - the protocol's arguments
        """The sizes that the job began with, which rule until there are traces."""
        return Decision(
            Allocation(decided_sizes(obs_WF), "traces"),
            reason="nothing is decided: the traces of the nodes' agents rule",
        )
