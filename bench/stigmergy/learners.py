"""Agents that learn in the passage, each for itself, from a table of its own (Q-learning), and what they come to.

Nothing is shared but the world: no reward, no message, and no table unless all agents shall be alike. The number of
agents is raised over the training (the curriculum): 2 first, then twice as many, until all are there. A new agent
begins with an empty table, or with the common one.
"""

import statistics
from collections import defaultdict
from typing import NamedTuple

import numpy as np

from .passage import NUM_ACTIONS, OURS, Passage, Place, Rules

LEARNING_RATE, DISCOUNT = 0.1, 0.97
FIRST_EXPLORED, LAST_EXPLORED = 0.5, 0.05
"""Share of actions that are drawn at random, at the beginning and at the end of the training."""
STEPS = 200
"""Length of an episode."""

Table = defaultdict[Place, list[float]]


class TeamResult(NamedTuple):
    """What a trained team does in an episode, means over the last ones."""

    delivered: float
    collisions: float
    asymmetry: float
    """Gini coefficient of the pellets by agent: 0 alike, near 1 one agent does it all."""
    idle: float
    """Share of the agents that deliver less than half of the mean."""


def train(
    num_agents: int,
    *,
    tunnel: int,
    has_traces: bool,
    num_episodes: int,
    num_judged: int,
    seed: int,
    rules: Rules = OURS,
    are_alike: bool = False,
) -> TeamResult:
    """Train a team, and let it act without exploring any more than at the end.

    Agents that are alike learn into one table, and act by it.
    """
    rng = np.random.default_rng(seed)
    tables = [_empty()] * num_agents if are_alike else [_empty() for _ in range(num_agents)]
    stages = _stages(num_agents)
    for episode in range(num_episodes):
        progress = episode / num_episodes
        present = stages[int(progress * len(stages))]
        explored = FIRST_EXPLORED + (LAST_EXPLORED - FIRST_EXPLORED) * progress
        world = Passage(present, tunnel, rng, has_traces, rules)
        _play(world, tables, rng, explored, learns=True)
    judged = []
    for _ in range(num_judged):
        world = Passage(num_agents, tunnel, rng, has_traces, rules)
        _play(world, tables, rng, LAST_EXPLORED, learns=False)
        judged.append(_result(world))
    return TeamResult(*(statistics.fmean(each) for each in zip(*judged, strict=True)))


def gini(numbers: list[int]) -> float:
    """0 for equal numbers, (n - 1) / n where one has it all; 0 where there is nothing."""
    total, count = sum(numbers), len(numbers)
    if total == 0:
        return 0.0
    weighted = sum((2 * place - count - 1) * number for place, number in enumerate(sorted(numbers), start=1))
    return weighted / (count * total)


def _stages(num_agents: int) -> list[int]:
    stages = [min(2, num_agents)]
    while stages[-1] < num_agents:
        stages.append(min(2 * stages[-1], num_agents))
    return stages


def _empty() -> Table:
    return defaultdict(lambda: [0.0] * NUM_ACTIONS)


def _play(world: Passage, tables: list[Table], rng: np.random.Generator, explored: float, *, learns: bool) -> None:
    orders = np.argsort(rng.random((STEPS, world.num_agents)), axis=1).tolist()
    tried = rng.random((STEPS, world.num_agents)).tolist()
    drawn = rng.integers(0, NUM_ACTIONS, (STEPS, world.num_agents)).tolist()
    pending: list[tuple[Place, int, float] | None] = [None] * world.num_agents
    for step in range(STEPS):
        for agent in orders[step]:
            values, place = tables[agent], world.seen_by(agent)
            known = values[place]
            before = pending[agent]
            if learns and before is not None:  # what follows an action is what the agent sees when it acts again
                old = values[before[0]]
                old[before[1]] += LEARNING_RATE * (before[2] + DISCOUNT * max(known) - old[before[1]])
            action = drawn[step][agent] if tried[step][agent] < explored else known.index(max(known))
            pending[agent] = (place, action, world.move(agent, action))
        world.evaporate()


def _result(world: Passage) -> TeamResult:
    mean = statistics.fmean(world.delivered)
    idle = sum(each < 0.5 * mean for each in world.delivered) / world.num_agents
    return TeamResult(sum(world.delivered), world.num_collisions, gini(world.delivered), idle)
