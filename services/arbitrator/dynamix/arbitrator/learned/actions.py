"""The action sets: what the choices of a network mean, and what it is shown to choose by.

A policy file lists its own inputs and actions, and both are selected by name: what a later program has more of does not
concern it.

`deltas`   one choice per rank: the published change of its local batch size, split `fixed` (method section 2).
`global`   one choice per job: a bounded multiplier on the global batch of `rule`, divided as the rule divides.

A third, `appetite`, is that of the agents of `stigmergy`: the same multipliers, on an agent's own wish. Collectors
decide by it (`dynamix.collector.agent_network`); here it has its names only.

Of equal logits the first choice wins, and the first is the neutral one: an untrained network changes nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from dynamix.arbitrator.policies import random
from dynamix.arbitrator.policies.carry import pack, unpack
from dynamix.arbitrator.policies.model.observation import Array32, decided_sizes
from dynamix.arbitrator.policies.policy import Decision
from dynamix.arbitrator.policies.rule import Rule
from dynamix.arbitrator.policies.sizing import divided
from dynamix.schemas.features import RANK_INDEX
from dynamix.schemas.messages import Job
from dynamix.schemas.messages.allocation import Allocation
from dynamix.schemas.networks import Choices
from dynamix.schemas.policies import MULTIPLIERS, Options

from . import inputs

ActionSetName = Literal["deltas", "global"]
LearnedSetName = Literal["deltas", "global", "appetite"]
"""With that of the agents of `stigmergy`, which decide in the collector."""

DELTAS = tuple(sorted(random.DELTAS, key=lambda delta: (abs(delta), delta)))
"""Samples; the published set, the neutral one first."""

ACTIONS: Mapping[LearnedSetName, tuple[float, ...]] = {
    "deltas": tuple(map(float, DELTAS)),
    "global": MULTIPLIERS,
    "appetite": MULTIPLIERS,
}
"""All actions of each set, the neutral one first; a policy file has these or some of them."""


class Situation(NamedTuple):
    """Input of a network for one window."""

    inputs_DI: Array32
    """Decisions x the inputs that are wanted, NaN where unknown. D is the number of ranks, or 1 for the whole job."""
    base: Decision
    """The decision of the neutral choice."""


class Deltas:
    """Changes each rank's own last size by one of `DELTAS`."""

    name: ActionSetName = "deltas"

    def __init__(self, wanted: Sequence[str], actions: Sequence[float]) -> None:
        """Show the inputs of these names, and take these actions."""
        self._columns = inputs.columns("deltas", wanted)
        self._deltas = np.array(actions, dtype=np.int64)
        self.options: Options = {}

    def situation(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Situation:  # noqa: ARG002 - what it needs to know of the past is in the observation
        """Inputs with one row per rank: its own, then the job's."""
        shared = inputs.global_inputs(job, window, obs_WF, global_F)
        own = inputs.rank_inputs(job, obs_WF)
        rows = np.concatenate([own, np.broadcast_to(shared, (len(own), len(shared)))], axis=1)
        return Situation(rows.take(self._columns, axis=1), Decision(Allocation(decided_sizes(obs_WF))))

    def decision(self, job: Job, situation: Situation, choices_D: Choices) -> Decision:
        """Last sizes plus deltas, within the job's bounds; the carry is one byte per rank."""
        wanted = np.asarray(situation.base.allocation.local_batch_sizes) + self._deltas[choices_D]
        sizes = np.clip(wanted, job.min_local_batch_size, job.max_local_batch_sizes)
        return Decision(Allocation(tuple(sizes.tolist())), carry=choices_D.astype(np.uint8).tobytes())

    def choices(self, job: Job, carry: bytes) -> Choices:
        """The last choice of each rank; neutral if the carry holds none."""
        if len(carry) != job.world_size:
            return np.zeros(job.world_size, dtype=np.int64)
        return np.frombuffer(carry, dtype=np.uint8).astype(np.int64)


class _Kept(msgspec.Struct, array_like=True):
    """The carry of `global`."""

    choice: int = 0
    rule_total: int | None = None
    """The rule's last global batch; `None` before its first decision."""
    rule: bytes = b""
    """The rule's carry."""


class GlobalLever:
    """Multiplies the global batch of `rule`, which is given its own past and never sees the multiplier.

    The carry holds the choice, the rule's last global batch and its carry: what the rule would do next does not
    depend on how it was overruled, so that the multipliers do not compound.
    """

    name: ActionSetName = "global"

    def __init__(self, wanted: Sequence[str], actions: Sequence[float]) -> None:
        """Show the inputs of these names, and take these actions."""
        self._columns = inputs.columns("global", wanted)
        self._multipliers = actions
        self._rule = Rule()
        self.options = self._rule.options

    def situation(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Situation:
        """Inputs with one row: the ranks' pooled, the job's, and the rule's decision."""
        kept = self._kept(carry)
        as_left = _as_the_rule_left_it(job, obs_WF, kept.rule_total)
        base = self._rule.decide(job, window, as_left, global_F, kept.rule)
        sizes = np.clip(base.allocation.local_batch_sizes, job.min_local_batch_size, job.max_local_batch_sizes)
        base = base._replace(allocation=base.allocation.with_sizes(tuple(sizes.tolist())))
        lever = np.log2([max(1, sizes.sum()) / max(1, sum(decided_sizes(obs_WF))), self._multipliers[kept.choice]])
        pooled, shared = inputs.pooled(job, obs_WF), inputs.global_inputs(job, window, obs_WF, global_F)
        row = np.concatenate([pooled, shared, lever.astype(np.float32)])
        return Situation(row[None, self._columns], base)

    def decision(self, job: Job, situation: Situation, choices_D: Choices) -> Decision:
        """The rule's decision, its global batch multiplied; exactly the rule's where the multiplier is 1."""
        base, choice = situation.base, int(choices_D[0])
        allocation, total = base.allocation, base.allocation.global_batch_size
        if self._multipliers[choice] != 1:
            proportions = np.asarray(allocation.local_batch_sizes, dtype=np.float64)
            allocation = allocation.with_sizes(divided(job, round(total * self._multipliers[choice]), proportions))
        return base._replace(allocation=allocation, carry=pack(_Kept(choice, total, base.carry)))

    def choices(self, job: Job, carry: bytes) -> Choices:  # noqa: ARG002 - one for the whole job
        """One; neutral where the carry holds none."""
        return np.array([self._kept(carry).choice], dtype=np.int64)

    def _kept(self, carry: bytes) -> _Kept:
        kept = unpack(_Kept, carry)
        return kept if kept.choice < len(self._multipliers) else msgspec.structs.replace(kept, choice=0)


ActionSet = Deltas | GlobalLever
"""Between a job's observation and a network that only knows numbered choices. `options` are those of a job that it
understands; `situation` has the arguments of `Policy.decide`."""


def action_set_named(
    name: ActionSetName, wanted: Sequence[str] | None = None, actions: Sequence[float] | None = None
) -> ActionSet:
    """The action set of that name, with the inputs and actions of a policy file, or with all that this program has."""
    wanted, actions = wanted or inputs.names(name), actions or ACTIONS[name]
    return Deltas(wanted, actions) if name == "deltas" else GlobalLever(wanted, actions)


def _as_the_rule_left_it(job: Job, obs_WF: Array32, last_total: int | None) -> Array32:
    """The observation with the last decision as the rule made it: the same division, its own global batch."""
    decided = decided_sizes(obs_WF)
    if last_total is None or last_total == sum(decided):
        return obs_WF
    rescaled = obs_WF.copy()
    rescaled[:, RANK_INDEX["decided_local_batch_size"]] = divided(
        job, last_total, np.asarray(decided, dtype=np.float64)
    )
    return rescaled
