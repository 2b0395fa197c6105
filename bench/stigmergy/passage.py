"""A narrow passage: agents that fetch pellets through a tunnel one cell wide, where none can pass another. Pure.

Home is cell 0 and holds all agents; the site is the last cell and does, too; between them each cell holds one. An agent
that is at the site takes a pellet, and delivers it at home. Agents move one after the other, in an order drawn for each
step: forward (to the site), back (to home), or not at all. One that wants to move into an occupied cell stays, and that
is a collision.

Every cell has a trace, rho <- (1 - ALPHA) rho + BETA for each agent in it, and a share of it diffuses into the cells
beside it. An agent sees its own place, whether it carries a pellet, whether the cells beside it are occupied and, where
there are traces, how strong they are there, in `LEVELS` steps. It never sees an agent further away.
"""

from dataclasses import dataclass, field

import numpy as np

STAY, FORWARD, BACK = 0, 1, 2
NUM_ACTIONS = 3
ALPHA, BETA, DIFFUSION = 0.05, 0.1, 0.2
LEVELS = (0.05, 0.3)
"""Strengths from which on a trace is felt as weak, and as strong."""

DELIVERED, PICKED_UP, COLLIDED, MOVED = 20.0, 10.0, -2.0, -0.1
"""Rewards of the agent itself."""

Place = tuple[int, bool, bool, bool, int, int]


@dataclass
class Passage:
    """The world; cells are numbered from home to the site."""

    num_agents: int
    tunnel: int
    rng: np.random.Generator
    has_traces: bool = True
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
        self._occupied = [0] * (self.site + 1)
        self._occupied[0] = self.num_agents

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
            self._is_full(ahead),
            self._is_full(behind),
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
            return MOVED
        if self._is_full(there):
            self.num_collisions += 1
            return COLLIDED
        self._occupied[here] -= 1
        self._occupied[there] += 1
        self.cells[agent] = there
        if there == self.site and not self.carries[agent]:
            self.carries[agent] = True
            return PICKED_UP
        if there == 0 and self.carries[agent]:
            self.carries[agent] = False
            self.delivered[agent] += 1
            return DELIVERED
        return MOVED

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

    def _is_full(self, cell: int) -> bool:
        return 0 < cell < self.site and self._occupied[cell] > 0

    def _level(self, cell: int) -> int:
        if not self.has_traces or not 0 <= cell <= self.site:
            return 0
        return sum(self.traces[cell] >= level for level in LEVELS)
