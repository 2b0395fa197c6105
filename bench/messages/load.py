"""The load: the states of every node of a job, window after window, as its collectors would send them.

Values differ between nodes and windows: a few variants are made beforehand and taken in turn. Sizes do not follow the
decisions: what an arbitrator decides costs it the same whether or not a job trains by it.
"""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np

from dynamix.reward.formula import Weights, reward_of
from dynamix.schemas import codec, subjects
from dynamix.schemas.features import state_of
from dynamix.schemas.messages import Job, Message, MetricWindow, Reward, State

from .nodes import node_window

NUM_VARIANTS = 4


class Parcel(NamedTuple):
    """A message ready to be published."""

    subject: str
    payload: bytes
    message_id: str


class Load:
    """What the nodes of one job send."""

    def __init__(self, job: Job, *, seed: int = 0, num_variants: int = NUM_VARIANTS) -> None:
        rng = np.random.default_rng(seed)
        self._windows = [[node_window(job, node, rng).collected() for node in job.nodes] for _ in range(num_variants)]
        self._states = [[state_of(window) for window in windows] for windows in self._windows]

    def states(self, window: int) -> Iterator[State]:
        """The state of each node for a window."""
        for state in self._states[window % len(self._states)]:
            yield msgspec.structs.replace(state, window=window)

    def windows(self, window: int) -> Iterator[MetricWindow]:
        """The metric window of each node, from which its state is made."""
        for measured in self._windows[window % len(self._windows)]:
            yield msgspec.structs.replace(measured, window=window)

    def rewards(self, window: int) -> Iterator[Reward]:
        """The rewards of each node's ranks."""
        for metrics in self.windows(window):
            yield reward_of(metrics, Weights())


def parcel(message: Message) -> Parcel:
    """Encode a message and name it, as the bus would."""
    return Parcel(subjects.subject_of(message), codec.encode(message), codec.message_id(message))
