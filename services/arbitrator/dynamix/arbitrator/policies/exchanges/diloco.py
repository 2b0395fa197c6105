"""`diloco`: a fixed sync period with an outer Nesterov step (DiLoCo: Douillard et al., arXiv 2311.08105).

Rounds of `every` local steps from the first step on, then a Nesterov step from where the round began towards the mean.
Published periods are some hundred steps; the default here is for short jobs. The batch stays. It needs
`attach(exchange="local")`.
"""

from typing import ClassVar

from dynamix.arbitrator.policies.base.options import MOST_STEPS, Option, Options, allocation_of, named, track
from dynamix.arbitrator.policies.base.policy import Decision
from dynamix.arbitrator.policies.model.observation import Array32
from dynamix.schemas.messages import Job
from dynamix.schemas.messages.allocation import EXCHANGE_CODECS, exchange_of
from dynamix.schemas.messages.policies import EXCHANGE_OPTIONS

_DEFAULTS = EXCHANGE_OPTIONS["diloco"]


class DiLoCo:
    """Never changes anything: local steps and outer ones, as torchft has them with a period set by hand."""

    name = "diloco"
    version = 1
    options: ClassVar[Options] = {
        "every": Option(_DEFAULTS["every"], 2, MOST_STEPS, "optimizer steps between two averagings", whole=True),
        "outer_rate": Option(_DEFAULTS["outer_rate"], 0.001, 10, "rate of the outer step; 1 is the mean"),
        "outer_momentum": Option(_DEFAULTS["outer_momentum"], 0, 0.999, "its Nesterov momentum"),
        "codec": named(EXCHANGE_CODECS, "how what moved is encoded"),
        "track": track(0),
    }

    def decide(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Decision:  # noqa: ARG002 - the protocol's arguments
        """The job's initial sizes, and the exchange of its options."""
        exchange = exchange_of({**_DEFAULTS, **job.policy_options})
        allocation = allocation_of(self.options, job, job.initial_local_batch_sizes, exchange)
        return Decision(allocation, reason=f"as its options say: gradients {exchange.label}")
