"""`halving`: half of the initial sizes, from the first decision on."""

from types import MappingProxyType

from dynamix.arbitrator.policies.policy import Decision
from dynamix.schemas.messages.allocation import Allocation
from dynamix.schemas.policies import Option


class Halving:
    name = "halving"
    version = 3
    options = MappingProxyType({"divisor": Option(2, 1, 16, "what the initial sizes are divided by", whole=True)})

    def decide(self, job, window, obs_WF, global_F, carry):  # noqa: ARG002 - the protocol's arguments
        divisor = int(job.policy_options.get("divisor", self.options["divisor"].default))
        return Decision(Allocation(tuple(size // divisor for size in job.initial_local_batch_sizes)))
