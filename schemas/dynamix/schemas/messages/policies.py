"""Facts about policies that trainers and arbitrators must agree on, by name."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

PolicyOptions = Mapping[str, float | str]
"""Options of a policy by name: numbers, or names such as that of a codec."""

GlobalBatch = Literal["fixed", "adaptive"]
"""`fixed`: the sum of the local batch sizes stays what the script said; `adaptive`: a policy may change it."""

DEFAULT_POLICY = "rule"
"""What a job with an adaptive global batch is steered by if it names no policy: the one that wins on held-out scenarios
(`dynamix evaluate`)."""

SPLIT_POLICY = "split"
"""What a job with a fixed global batch is steered by if it names no policy."""

OUR_POLICIES = frozenset(
    {
        *("static", "split", "random", "proportional", "noise-scale", "goodput", "doubling", "rule", "stigmergy"),
        *("diloco", "qsr", "adacomm", "accordion", "gravac"),
        *("ppo", "ppo-1", "ppo-2", "ppo-3", "ppo-4"),
        *("ppo-paper", "ppo-paper-1", "ppo-paper-2", "ppo-paper-3", "ppo-paper-4"),
    }
)
"""The policies that come with the arbitrator; others are learned ones on the bus, or of other packages beside it."""

KEEPS_GLOBAL_BATCH = frozenset({"static", "split", "proportional", "diloco", "qsr", "adacomm", "accordion", "gravac"})
"""Our policies that never change the global batch."""

RECURRING = frozenset({"rule"})
"""Our policies that leave what they learned to the next run of a job family, and begin with it."""

DIVIDED_BY_RANKS = frozenset({"split", "rule", "ppo"})
"""Policies that leave the division of the global batch to the training processes unless option `track` says 0."""

STIGMERGY = "stigmergy"
"""The policy of agents on all nodes: the ranks divide each step by the traces that these leave; no centre decides."""

STIGMERGY_OPTIONS: Mapping[str, float] = MappingProxyType(
    {
        "evaporation": 0.5,
        "diffusion": 0.2,
        "noise_multiplier": 1.0,
        "rate_weight": 0.5,
        "max_change": 2.0,
        "dead_band": 0.05,
        "learned": 0.0,
    }
)
"""Its options with their defaults: the ranks and the agents need them, and no arbitrator tells them."""

MULTIPLIERS = (1.0, 0.85, 1.2, 0.7, 1.4, 0.5, 2.0)
"""What a learned policy chooses among: factors on the global batch of a rule (`ppo`), or on an agent's wish
(`stigmergy`). About symmetric in doublings, at most one doubling, the neutral one first."""

RATE_EXPONENTS: Mapping[str, float] = MappingProxyType({"none": 0.0, "sqrt": 0.5, "linear": 1.0})
"""Power of B that each learning-rate rule sets the learning rate in proportion to."""

EXCHANGE_OPTIONS: Mapping[str, PolicyOptions] = MappingProxyType(
    {"static": {}, "diloco": {"every": 8, "outer_rate": 0.7, "outer_momentum": 0.9}}
)
"""Policies that let gradients travel as their options say, from the first step on, with the defaults of these.

The options are `every`, `codec`, `route`, `outer_rate` and `outer_momentum`; where no default is given, they change
nothing.
"""

Split = Literal["fixed", "tracking", "traces"]
"""`fixed`: sizes as they were decided; `tracking`: their sum was, and the ranks divide it themselves; `traces`: nothing
was, sum and division are those of the traces that the agents of all nodes leave."""


def initial_split(policy: str, options: PolicyOptions, *, supports_tracking: bool) -> Split:
    """Who divides the global batch from the first step on, before any decision.

    The ranks need no bus to divide it: where a policy leaves that to them, they begin at once. Waiting for the first
    decision would cost some thirty steps at the pace of the slowest rank.
    """
    if policy == STIGMERGY:
        return "traces"
    tracks = options.get("track", float(policy in DIVIDED_BY_RANKS)) == 1
    return "tracking" if supports_tracking and tracks else "fixed"
