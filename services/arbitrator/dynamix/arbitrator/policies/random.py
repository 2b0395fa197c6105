"""`random`: a published delta action per rank, drawn uniformly. A baseline for learned policies."""

import hashlib
from typing import ClassVar

import numpy as np

from dynamix.schemas.messages import Job
from dynamix.schemas.policies import POLICY_OPTIONS, Options

from .model.observation import Array32, decided_sizes
from .options import allocation_of
from .policy import Decision

DELTAS = (-100, -25, 0, 25, 100)
"""The published action set in samples (method section 2), in the order in which it is drawn from."""


class Random:
    """Draws from `keyed_generator`."""

    name = "random"
    version = 1
    options: ClassVar[Options] = POLICY_OPTIONS["random"]

    def decide(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Decision:  # noqa: ARG002 - the protocol's arguments
        """The last decision plus one delta per rank."""
        draws = keyed_generator(job, window).integers(len(DELTAS), size=job.world_size)
        sizes = tuple(max(0, size + DELTAS[draw]) for size, draw in zip(decided_sizes(obs_WF), draws, strict=True))
        logprobs = (-float(np.log(len(DELTAS))),) * job.world_size
        return Decision(allocation_of(self.options, job, sizes), logprobs=logprobs, reason="drawn at random")


def keyed_generator(job: Job, window: int, purpose: str = "") -> np.random.Generator:
    """A counter-based generator keyed by job, generation, window and seed: a replay draws the same."""
    identity = f"{purpose}{job.job}:{job.generation}:{window}:{job.seed}".encode()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(hashlib.sha256(identity).digest()[:16])))
