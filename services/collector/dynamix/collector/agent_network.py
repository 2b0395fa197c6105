"""The network of learned agents: a factor on an agent's own wish, chosen by what the agent sees. numpy only.

All agents of all jobs have the same network, and each evaluates it for itself. Untrained it chooses the neutral factor,
1, so that the agent is its rule to the bit. The likeliest choice is taken; drawn is while learning only
(`dynamix.lab.learning.episodes`).

The file is one of `dynamix learn --policy stigmergy`. One comes with the package, in `shipped_agents/`; the setting
DYNAMIX_COLLECTOR_AGENTS names another. All nodes of a job should have the same.
"""

import hashlib
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal, Self

import msgspec
import numpy as np
from msgspec import Meta

from dynamix.schemas import sight
from dynamix.schemas.networks import (
    Array64,
    Forward,
    Metadata,
    NetworkFileError,
    Normalisation,
    check_same,
    check_tensors,
    network_shapes,
    read_network,
)
from dynamix.schemas.policies import MULTIPLIERS
from dynamix.schemas.sight import Sight

SHIPPED = "shipped_agents/stigmergy.safetensors"


class AgentSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of the network, among the settings of its learning."""

    hidden_sizes: Annotated[tuple[Annotated[int, Meta(ge=1, le=4096)], ...], Meta(max_length=8)]


class AgentMetadata(Metadata, frozen=True, kw_only=True):
    """Metadata that an agent needs of its network; the file has more (`arbitrator.learned.policy_file`)."""

    action_set: Literal["appetite"]
    settings: AgentSettings


class AgentNetwork:
    """Chooses a factor; it keeps nothing, so that equal reports give equal factors."""

    def __init__(self, data: bytes, source: str) -> None:
        """Read and check a file's content.

        Raises:
            NetworkFileError: naming `source` and what does not fit.
        """
        try:
            what = "a network of agents, as `dynamix learn --policy stigmergy` writes it"
            metadata, tensors = read_network(data, AgentMetadata, what)
            check_same("inputs", metadata.inputs, sight.INPUTS)
            check_same("actions", metadata.actions, MULTIPLIERS)
            shapes = network_shapes(len(metadata.inputs), metadata.settings.hidden_sizes, len(metadata.actions))
            check_tensors(tensors, shapes)
        except NetworkFileError as error:
            raise NetworkFileError(f"{source}: {error}") from error
        self.digest = hashlib.sha256(data).hexdigest()
        self.actions = metadata.actions
        self._normalisation = Normalisation.of_tensors(tensors)
        self.forward = Forward(tensors, len(metadata.settings.hidden_sizes))

    @classmethod
    def read(cls, path: Path) -> Self:
        """The network in a file.

        Raises:
            NetworkFileError: when it cannot be read, or does not fit.
        """
        try:
            data = path.read_bytes()
        except OSError as error:
            raise NetworkFileError(f"{path}: cannot be read: {error.strerror}") from error
        return cls(data, str(path))

    def normalised(self, inputs_I: sight.Array32) -> Array64:
        """One row for the network."""
        return self._normalisation.applied(inputs_I[None])

    def factor(self, seen: Sight) -> float:
        """The likeliest factor on the agent's wish; of equal ones the first, which is the neutral one first of all."""
        logits_DA = self.forward.logits(self.normalised(sight.inputs_of(seen)))
        return self.actions[int(np.argmax(logits_DA[0]))]


@cache
def shipped_network() -> AgentNetwork:
    """The network that comes with the package, read once per process."""
    data = resources.files("dynamix.collector").joinpath(SHIPPED).read_bytes()
    return AgentNetwork(data, SHIPPED)
