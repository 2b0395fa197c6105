"""`static`: the sizes that the job started with. The baseline of every comparison.

Its options set the gradient exchange from the first step on, as far as the job permits it (`attach(exchange=...)`).
"""

from typing import ClassVar

from dynamix.schemas.messages import Job
from dynamix.schemas.messages.allocation import EXCHANGE_CODECS, ROUTES, exchange_of
from dynamix.schemas.messages.policy_options import MOST_STEPS

from .model.observation import Array32
from .options import Option, Options, allocation_of, named, track
from .policy import Decision


class Static:
    """Never changes anything."""

    name = "static"
    version = 1
    options: ClassVar[Options] = {
        "track": track(0),
        "every": Option(1, 1, MOST_STEPS, "optimizer steps between two averagings; above 1: local steps", whole=True),
        "codec": named(EXCHANGE_CODECS, "how gradients are encoded; an extension's codec by its name"),
        "route": named(ROUTES, "how they are summed"),
        "outer_rate": Option(1, 0.001, 10, "rate of the outer step after local steps; 1 is the mean"),
        "outer_momentum": Option(0, 0, 0.999, "its Nesterov momentum"),
    }

    def decide(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Decision:  # noqa: ARG002 - the protocol's arguments
        """The job's initial sizes."""
        exchange = exchange_of(job.policy_options)
        allocation = allocation_of(self.options, job, job.initial_local_batch_sizes, exchange)
        return Decision(allocation, reason="the sizes that the job began with")
