"""Levers on `rule`: what may be changed of one of its decisions, in bounds. Pure.

A lever holds for one decision. What the rule itself would have done is remembered beside it as its wish, so that the
rule's own hysteresis goes on as if nothing had been changed; of what really ruled it learns all that it measures.
"""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from msgspec.structs import replace as changed

from dynamix.schemas.messages import Job
from dynamix.schemas.messages.allocation import EXACT, Exchange, is_permitted

from .exchange_memory import OVER_OWNERS, ExchangeMemory, way_of

Change = Literal["", "probe", "shorter", "longer", "none", "bf16", "int8"]
"""What a lever changes of how gradients travel. `probe`: as they are and in each step, which measures what the rule
rests on; `shorter` and `longer`: the next period of local steps; the others are codecs."""
MOST_AGE = 0xFFFF


class Lever(NamedTuple):
    """One change of a decision; as it is by default, none."""

    noise: float = 1.0
    """Factor on the noise scale: above 1, larger batches count for more."""
    change: Change = ""


AS_RULE = Lever()


@dataclass(frozen=True)
class Wish:
    """How the rule itself would have gradients travel."""

    exchange: Exchange
    age: int
    """Windows since it wished for another way."""

    def seen_in(self, memory: ExchangeMemory) -> ExchangeMemory:
        """The memory as the rule left it: with its own newest decision."""
        own = memory.age if memory.newest == self.exchange else 0
        age = max(min(self.age + 1, MOST_AGE), own)
        return replace(memory, ruling=(*memory.ruling[:-1], self.exchange), age=age)


def changed_exchange(
    lever: Lever, wished: Exchange, job: Job, memory: ExchangeMemory, *, knows_times: bool, max_every: int
) -> Exchange:
    """The way that the decision names; the wish where nothing is known yet, or the job does not permit the change."""
    if not lever.change or not knows_times:
        return wished
    found = _changed(lever.change, wished, job, max_every)
    if found is None or (found.every > 1 and memory.blocked) or not is_permitted(found, job.exchange):
        return wished
    return found


def _changed(change: Change, wished: Exchange, job: Job, max_every: int) -> Exchange | None:
    way = way_of(wished)
    if change == "probe":
        return EXACT
    if change in ("shorter", "longer"):
        if way in (OVER_OWNERS, "rows"):
            return None
        periods = [every for every in range(1, max_every + 1) if job.window_steps % every == 0]
        below = [every for every in periods if every < wished.every]
        above = [every for every in periods if every > wished.every]
        every = (below[-1:] if change == "shorter" else above[:1]) or [wished.every]
        return changed(wished, every=every[0])
    return Exchange(codec=change, every=1 if way in (OVER_OWNERS, "rows") else wished.every)
