"""The action set `levers`: once per window a network may put one lever on the next decision of `rule`.

For what has no closed form: how much larger batches are worth late in a run, how long local steps may go on while the
ranks drift apart, when to look again at what gradients cost as they are, which codec while congestion comes and goes.
The levers are few and bounded. The first one changes nothing, and of equal logits it wins: untrained, the policy
decides as `rule` does, bit for bit.

It decides by the last windows (`situation`). They are in the carry, as are the last choice, the rule's own wish and its
carry: nothing else is remembered, and a recorded job is replayed to the bit.
"""

import struct
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Literal, NamedTuple

import numpy as np

from dynamix.arbitrator.policies.model.exchange_memory import WAYS, by_way, way_of
from dynamix.arbitrator.policies.model.levers import AS_RULE, Lever, Wish
from dynamix.arbitrator.policies.model.observation import Array32
from dynamix.arbitrator.policies.model.rule_memory import RuleMemory
from dynamix.arbitrator.policies.options import Options
from dynamix.arbitrator.policies.policy import Decision
from dynamix.arbitrator.policies.rule import Rule
from dynamix.schemas.messages import Job
from dynamix.schemas.messages.allocation import EXACT
from dynamix.schemas.networks.forward import Choices

from .situation import NUM_WINDOWS, WINDOW, Intent, Situation, steered_inputs, window_inputs, window_row

LEVERS: Mapping[float, Lever] = MappingProxyType(
    {
        0.0: AS_RULE,
        1.0: Lever(noise=0.5),
        2.0: Lever(noise=0.7),
        3.0: Lever(noise=1.4),
        4.0: Lever(noise=2.0),
        5.0: Lever(change="probe"),
        6.0: Lever(change="shorter"),
        7.0: Lever(change="longer"),
        8.0: Lever(change="none"),
        9.0: Lever(change="bf16"),
        10.0: Lever(change="int8"),
    }
)
"""By the number that a policy file has; a new one takes a new number."""
LEVER_NUMBERS = tuple(LEVERS)

_HEAD = struct.Struct("<BB?BHH")
_ROW_BYTES = 4 * len(WINDOW)


class LeverMemory(NamedTuple):
    """The carry in parts."""

    choice: int
    wish: Wish | None
    rows_KV: Array32
    """The last windows, the newest first."""
    rule: bytes

    def pack(self) -> bytes:
        """Bytes for the carry."""
        wish = self.wish or Wish(EXACT, 0)
        way = WAYS.index(way_of(wish.exchange))
        known = self.wish is not None
        head = _HEAD.pack(self.choice, len(self.rows_KV), known, way, wish.exchange.every, wish.age)
        return head + self.rows_KV.astype("<f4").tobytes() + self.rule

    @classmethod
    def unpack(cls, carry: bytes) -> "LeverMemory":
        """What `pack` gave; as a job begins from anything else."""
        if len(carry) < _HEAD.size:
            return cls(0, None, np.empty((0, len(WINDOW)), dtype=np.float32), b"")
        choice, num_rows, known, way, every, age = _HEAD.unpack_from(carry)
        end = _HEAD.size + num_rows * _ROW_BYTES
        rows_KV = np.frombuffer(carry[_HEAD.size : end], dtype="<f4").reshape(num_rows, len(WINDOW))
        wish = Wish(by_way(WAYS[way], every), age) if known else None
        return cls(choice, wish, rows_KV.astype(np.float32), carry[end:])


class Levers:
    """Puts one of some levers on each decision of `rule`."""

    name: Literal["levers"] = "levers"

    def __init__(self, columns: Sequence[int], actions: Sequence[float]) -> None:
        """Show the inputs at these places, and take these levers."""
        self._columns = list(columns)
        self._levers = [LEVERS[number] for number in actions]
        self._rule = Rule()
        self.options: Options = self._rule.options

    def situation(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Situation:
        """One row: the last windows, and what the rule would do."""
        before = LeverMemory.unpack(carry)
        choice = before.choice if before.choice < len(self._levers) else 0
        known = RuleMemory.unpack(before.rule, job).exchange
        row = window_row(job, obs_WF, global_F, known, self._levers[choice].noise)
        rows_KV = np.concatenate([row[None], before.rows_KV])[:NUM_WINDOWS]
        seen = before._replace(rows_KV=rows_KV)
        steer = partial(self._steered, job, obs_WF, global_F, seen)
        base, wish = self._rule.steered(job, obs_WF, global_F, before.rule, wish=before.wish)
        wished = EXACT if wish is None else wish.exchange
        shown = np.concatenate(
            [window_inputs(rows_KV), steered_inputs(job, window, obs_WF, global_F, Intent(base, wished))]
        )
        kept = seen._replace(choice=0, wish=wish, rule=base.carry).pack()
        return Situation(shown[None, self._columns], base._replace(carry=kept), steer)

    def decision(self, job: Job, situation: Situation, choices_D: Choices) -> Decision:  # noqa: ARG002 - as other sets have it
        """The rule's decision with the chosen lever on it; exactly the rule's for the neutral one."""
        choice = int(choices_D[0])
        if choice == 0 or situation.steer is None:
            return situation.base
        return situation.steer(choice)

    def choices(self, job: Job, carry: bytes) -> Choices:  # noqa: ARG002 - one for the whole job
        """One; neutral where the carry holds none."""
        choice = LeverMemory.unpack(carry).choice
        return np.array([choice if choice < len(self._levers) else 0], dtype=np.int64)

    def _steered(self, job: Job, obs_WF: Array32, global_F: Array32, seen: LeverMemory, choice: int) -> Decision:
        lever = self._levers[choice]
        found, wish = self._rule.steered(job, obs_WF, global_F, seen.rule, lever=lever, wish=seen.wish)
        return found._replace(carry=seen._replace(choice=choice, wish=wish, rule=found.carry).pack())
