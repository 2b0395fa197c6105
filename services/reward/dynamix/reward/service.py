"""The shell of the reward service: consume windows, publish rewards.

The service has no memory, so replicas are harmless: equal rewards have equal message ids and the broker keeps one.
"""

import asyncio
from statistics import fmean
from typing import Literal

from dynamix.runtime.bus import BusMessage
from dynamix.runtime.metrics import LabelTable, Scrape, ServiceMetrics
from dynamix.runtime.service import Context
from dynamix.schemas import subjects
from dynamix.schemas.codec import MalformedMessageError, decode, encode
from dynamix.schemas.messages import MetricWindow, Reward
from dynamix.schemas.streams import FEED

from .formula import Weights, reward_of

MAX_BATCH = 256
"""Windows that are rewarded without a pause, 65 us each for 8 ranks."""


COUNTERS = {"rewards": "messages with the rewards of a node's ranks"}
MAX_NODES = 1000
"""Pairs of job and node."""


class RewardSettings(Weights, frozen=True, kw_only=True):
    """The weights of the terms, and which formula they are for: `DYNAMIX_REWARD_<FIELD>` or `--field`."""

    formula: Literal["auto", "paper-sgd", "paper-adam", "time-aware"] = "auto"
    """`auto`: the published formula for each job's optimizer."""


async def serve(context: Context[RewardSettings]) -> None:
    """Turn every metric window of every job into rewards until the context stops."""
    shown = ShownRewards(context.metrics)
    windows = subjects.of("window", subjects.ANY, subjects.ANY)
    durable = f"reward-{context.instance}"
    async with context.bus.consume(FEED.name, [windows], start="new", durable=durable, max_batch=MAX_BATCH) as consumer:
        context.counters["ready"] = 1
        async for batch in consumer:
            rewards = [reward for message in batch if (reward := await _reward(context, message)) is not None]
            if not all(await asyncio.gather(*[context.publish_when_room(reward) for reward in rewards])):
                return
            await consumer.ack(batch[-1])
            context.count("rewards", len(rewards))
            for reward in rewards:
                shown.record(reward)


async def _reward(context: Context[RewardSettings], message: BusMessage) -> Reward | None:
    try:
        window = decode(MetricWindow, message.subject, message.payload)
        formula = context.settings.formula
        reward = reward_of(window, context.settings, None if formula == "auto" else formula)
        encode(reward)  # a sum of finite terms may still be more than a float holds
    except (MalformedMessageError, OverflowError) as error:
        await context.dead_letter(message, str(error))
        return None
    return reward


class ShownRewards:
    """Keeps the newest rewards until they are asked for."""

    def __init__(self, metrics: ServiceMetrics) -> None:
        self._rewards: LabelTable[tuple[str, str], Reward] = LabelTable(max_entries=MAX_NODES)
        metrics.declare(counters=COUNTERS)
        metrics.add(self.show)

    def record(self, reward: Reward) -> None:
        """Keep a node's rewards; the newest are shown."""
        self._rewards.record((reward.job, reward.node), reward)

    def show(self, scrape: Scrape) -> None:
        """Show all that is kept, as means over the ranks of a node."""
        for _, reward, _ in self._rewards.entries():
            labels = {"training_job": reward.job, "training_node": reward.node}
            scrape.gauge("reward", "newest reward, mean over ranks", fmean(r.reward for r in reward.ranks), **labels)
            for term in reward.ranks[0].terms:
                mean = fmean(rank.terms.get(term, 0.0) for rank in reward.ranks)
                scrape.gauge("reward_term", "one weighted term of it", mean, **labels, term=term)
        scrape.counter("jobs_not_shown", "pairs of job and node left out, too many", self._rewards.num_evicted)
