"""`static`: the sizes that the job started with. The baseline of every comparison.

Its options set the gradient exchange from the first step on, as far as the job permits it (`attach(exchange=...)`).
"""

from typing import ClassVar

from dynamix.schemas.messages import Job
from dynamix.schemas.policies import POLICY_OPTIONS, Options, exchange_of

from .model.observation import Array32
from .options import allocation_of
from .policy import Decision


class Static:
    """Never changes anything."""

    name = "static"
    version = 1
    options: ClassVar[Options] = POLICY_OPTIONS["static"]

    def decide(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Decision:  # noqa: ARG002 - the protocol's arguments
        """The job's initial sizes."""
        exchange = exchange_of(job.policy_options)
        allocation = allocation_of(self.options, job, job.initial_local_batch_sizes, exchange)
        return Decision(allocation, reason="the sizes that the job began with")
