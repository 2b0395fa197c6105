"""A narrow passage: agents that fetch pellets through a tunnel one cell wide, where none can pass another. Pure.

Home is cell 0 and holds all agents; the site is the last cell and does, too; between them each cell holds one. An agent
that is at the site takes a pellet, and delivers it at home. Agents move one after the other, in an order drawn for each
step: forward (to the site), back (to home), or not at all. One that wants to move into an occupied cell stays, and that
is a collision.

Every cell has a trace, rho <- (1 - ALPHA) rho + BETA for each agent in it, and a share of it diffuses into the cells
beside it. An agent sees its own place, whether it carries a pellet, whether the cells beside it are occupied (and by
`REPORTED` rules, whether those agents carry one) and, where there are traces, how strong they are there, in `LEVELS`
steps. It never sees an agent further away.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

STAY, FORWARD, BACK = 0, 1, 2
NUM_ACTIONS = 3
ALPHA, BETA, DIFFUSION = 0.05, 0.1, 0.2
LEVELS = (0.05, 0.3)
"""Strengths from which on a trace is felt as weak, and as strong."""


class Rules(NamedTuple):
    """Rewards of the agent itself, and what it sees."""

    delivered: float
    picked_up: float
    collided: float
    approached: float
    """A step towards the site without a pellet, or home with one."""
    moved_off: float
    sees_cargo: bool


OURS = Rules(20.0, 10.0, -2.0, -0.1, -0.1, sees_cargo=False)
REPORTED = Rules(20.0, 10.0, -0.4, 0.5, -0.5, sees_cargo=True)
"""Rewards in the proportions that a third party reports of the source."""

Place = tuple[int, bool, int, int, int, int]


@dataclass
class Passage:
    """The world; cells are numbered from home to the site."""

    num_agents: int
    tunnel: int
    rng: np.random.Generator
    has_traces: bool = True
    rules: Rules = OURS
    cells: list[int] = field(init=False)
    """Where each agent is."""
    carries: list[bool] = field(init=False)
    delivered: list[int] = field(init=False)
    """Pellets, by agent."""
    num_collisions: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        """All agents begin at home, without a pellet, in a world without traces."""
        self.cells, self.carries = [0] * self.num_agents, [False] * self.num_agents
        self.delivered = [0] * self.num_agents
        self.traces = [0.0] * (self.site + 1)
        self._inside: dict[int, int] = {}
        """The agent in a cell of the tunnel."""

    @property
    def site(self) -> int:
        """The cell with the pellets."""
        return self.tunnel + 1

    def seen_by(self, agent: int) -> Place:
        """All that an agent sees."""
        cell = self.cells[agent]
        ahead, behind = cell + 1, cell - 1
        return (
            cell,
            self.carries[agent],
            self._beside(ahead),
            self._beside(behind),
            self._level(ahead),
            self._level(behind),
        )

    def move(self, agent: int, action: int) -> float:
        """Let one agent act; its reward."""
        if action == STAY:
            return 0.0
        here = self.cells[agent]
        there = here + (1 if action == FORWARD else -1)
        if not 0 <= there <= self.site:
            return self.rules.moved_off
        if there in self._inside:
            self.num_collisions += 1
            return self.rules.collided
        self._inside.pop(here, None)
        if 0 < there < self.site:
            self._inside[there] = agent
        self.cells[agent] = there
        if there == self.site and not self.carries[agent]:
            self.carries[agent] = True
            return self.rules.picked_up
        if there == 0 and self.carries[agent]:
            self.carries[agent] = False
            self.delivered[agent] += 1
            return self.rules.delivered
        return self.rules.approached if (action == FORWARD) != self.carries[agent] else self.rules.moved_off

    def evaporate(self) -> None:
        """End a step: traces evaporate, diffuse, and are laid in the tunnel, where there is only room for one."""
        before, last = self.traces, self.site
        mixed = [
            (1.0 - DIFFUSION) * trace + 0.5 * DIFFUSION * (before[max(at - 1, 0)] + before[min(at + 1, last)])
            for at, trace in enumerate(before)
        ]
        self.traces = [(1.0 - ALPHA) * trace for trace in mixed]
        for cell in self.cells:
            if 0 < cell < last:
                self.traces[cell] += BETA

    def _beside(self, cell: int) -> int:
        """0 for room, 1 for an agent, 2 for one that is seen to carry a pellet."""
        other = self._inside.get(cell)
        return 0 if other is None else 1 + (self.rules.sees_cargo and self.carries[other])

    def _level(self, cell: int) -> int:
        if not self.has_traces or not 0 <= cell <= self.site:
            return 0
        return sum(self.traces[cell] >= level for level in LEVELS)
