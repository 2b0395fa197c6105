"""What came over the bus of one run."""

import asyncio
from collections.abc import Callable

from dynamix.schemas.messages import Action, Applied, Message, MetricWindow

Watcher = Callable[[dict[int, MetricWindow], int], None]
"""Called with the windows of all ranks, once they are there, and the number of actions applied so far."""


class Seen:
    """Collects the messages of a job."""

    def __init__(self, world_size: int, num_windows: int, watch: Watcher) -> None:
        self.windows: dict[int, dict[int, MetricWindow]] = {}
        """By window and rank; a host has one rank."""
        self.applied: list[Applied] = []
        self.actions: list[Action] = []
        self.complete = asyncio.Event()
        """All windows of all ranks are there."""
        self._world_size = world_size
        self._num_windows = num_windows
        self._watch = watch

    @property
    def num_whole_windows(self) -> int:
        """Windows of which every rank's is there."""
        return sum(len(ranks) == self._world_size for ranks in self.windows.values())

    def add(self, message: Message) -> None:
        """Take in one message; a job that was restarted would count its windows anew, but none of these is."""
        match message:
            case MetricWindow():
                self._add_window(message)
            case Applied():
                self.applied.append(message)
            case Action():
                self.actions.append(message)

    def _add_window(self, window: MetricWindow) -> None:
        ranks = self.windows.setdefault(window.window, {})
        ranks.update({rank.rank: window for rank in window.ranks})
        if len(ranks) == self._world_size:
            self._watch(ranks, len(self.applied))
        if self.num_whole_windows >= self._num_windows:
            self.complete.set()
