"""Metrics of the reward service: the newest rewards of each job and node."""

from statistics import fmean

from dynamix.runtime.metrics import LabelTable, Scrape, ServiceMetrics
from dynamix.schemas.messages import Reward

COUNTERS = {"rewards": "messages with the rewards of a node's ranks"}
MAX_NODES = 1000
"""Pairs of job and node."""


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
        for entry in self._rewards.entries():
            reward = entry.value
            labels = {"training_job": reward.job, "training_node": reward.node}
            scrape.gauge("reward", "newest reward, mean over ranks", fmean(r.reward for r in reward.ranks), **labels)
            for term in reward.ranks[0].terms:
                mean = fmean(rank.terms.get(term, 0.0) for rank in reward.ranks)
                scrape.gauge("reward_term", "one weighted term of it", mean, **labels, term=term)
        scrape.counter("jobs_not_shown", "pairs of job and node left out, too many", self._rewards.num_evicted)
