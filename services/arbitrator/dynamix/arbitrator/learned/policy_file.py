"""A learned policy as a file: safetensors, its metadata one JSON text. Reading checks everything and runs nothing.

Some files come with the package, in `shipped_policies/`: version 1 of their names.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import msgspec
import numpy as np
from msgspec import Meta
from safetensors.numpy import save

from dynamix.schemas import networks
from dynamix.schemas.features import FEATURE_VERSION, GLOBAL_FEATURES, RANK_FEATURES
from dynamix.schemas.messages.fields import Count, Text, Token
from dynamix.schemas.networks import (
    FORMAT,
    METADATA_KEY,
    Array,
    NetworkFileError,
    check_actions,
    check_format,
    check_names,
    check_tensors,
    metadata_text,
    read_tensors,
)
from dynamix.schemas.subjects import check_token

from . import inputs
from .actions import ACTIONS, ActionSet, LearnedSetName, action_set_named
from .ppo_settings import PPOSettings

SUFFIX = ".safetensors"
OPTIMIZER = "optimizer."
"""Prefix of the tensors with which learning continues: Adam's moments of each parameter, and its steps so far."""
OPTIMIZER_STEP = OPTIMIZER + "step"
MOMENTS = ("exp_avg", "exp_avg_sq")

SHIPPED_POLICIES = ("ppo", "ppo-paper")
"""The learned policies. NAME.safetensors is what a job of that name gets, NAME-SEED.safetensors the same learning begun
with another seed: the policy seeds of a comparison."""

SHIPPED_VERSION = 1
"""Versions on the bus are higher, so that a name and a number never mean two policies."""


class PolicyFileError(ValueError):
    """The policy file cannot be used; the message has the fault and the fix."""


class PolicyMetadata(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Metadata of a learned policy: its form, origin and score."""

    policy: Token
    """The name that a job's specification chooses it by."""
    action_set: LearnedSetName
    algorithm: Literal["clipped", "simplified"]
    hidden_sizes: Annotated[tuple[Annotated[int, Meta(ge=1, le=4096)], ...], Meta(max_length=8)]
    reward_formula: Text
    """`auto`: the published one for each job's optimizer."""
    reward_weights: dict[str, float] = {}
    settings: dict[str, Any] = {}
    """Settings of the learning (`PPOSettings`); missing ones have their defaults."""
    num_updates: Count = 0
    num_episodes: Count = 0
    scenarios: tuple[Text, ...] = ()
    """The scenarios that it learned on."""
    seeds: tuple[Count, ...] = ()
    """The seeds of the learning."""
    scores: dict[str, float] = {}
    """Scores by name, as measured at the end of learning; lower is better for times and ratios."""
    learned_from: tuple[Text, ...] = ()
    """The newest live runs, `<job>:<generation>`, that this version learned from."""
    parent: Text = ""
    """SHA-256 of the file that the learning continued from; empty for a new policy."""
    created_by: Text = ""
    """The program that wrote it."""
    format: int = FORMAT
    feature_version: int = FEATURE_VERSION
    rank_features: tuple[str, ...] = tuple(feature.name for feature in RANK_FEATURES)
    global_features: tuple[str, ...] = tuple(feature.name for feature in GLOBAL_FEATURES)
    inputs: tuple[str, ...] = ()
    """Names, in the order of the network's inputs."""
    actions: tuple[float, ...] = ()
    """Meaning of the network's outputs, in order; the neutral action first."""

    @classmethod
    def of(cls, *, action_set: LearnedSetName, **fields: Any) -> Self:
        """Metadata of a policy of this program: its inputs and actions are filled in."""
        return cls(action_set=action_set, inputs=inputs.names(action_set), actions=ACTIONS[action_set], **fields)

    def make_action_set(self) -> ActionSet:
        """The action set that shows the file's own inputs and takes its own actions.

        Raises:
            PolicyFileError: when it is not the arbitrator that decides by the file.
        """
        if self.action_set == "appetite":
            raise PolicyFileError(
                "agents of policy 'stigmergy' decide by this file, no arbitrator does: name it in "
                'DYNAMIX_COLLECTOR_AGENTS, and give jobs policy_options={"learned": 1}'
            )
        return action_set_named(self.action_set, self.inputs, self.actions)

    @property
    def ppo_settings(self) -> PPOSettings:
        """The settings to learn on with.

        Raises:
            msgspec.ValidationError: when `settings` are not PPO's; never for a file that was read.
        """
        own = {"objective": self.algorithm, "hidden_sizes": self.hidden_sizes}
        return msgspec.convert({**own, **self.settings}, PPOSettings)


class PolicyFile(NamedTuple):
    """Metadata and tensors; those with which learning continues begin with `optimizer.`."""

    metadata: PolicyMetadata
    tensors: Mapping[str, Array]
    content: bytes = b""
    """The bytes that were read; empty for a policy that was never a file."""

    def to_bytes(self) -> bytes:
        """The file's content, byte for byte as it was read; equal new policies give equal bytes."""
        if self.content:
            return self.content
        text = json.dumps(msgspec.to_builtins(self.metadata), sort_keys=True, separators=(",", ":"))
        little = {name: np.ascontiguousarray(array) for name, array in self.tensors.items()}
        return save(little, {METADATA_KEY: text})

    @property
    def digest(self) -> str:
        """SHA-256 of the content, in hexadecimal."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @classmethod
    def from_bytes(cls, data: bytes, source: str = "policy file") -> Self:
        """Read and check a file's content.

        Raises:
            PolicyFileError: naming `source` and what does not fit.
        """
        try:
            metadata = _metadata(data)
            _check_identity(metadata)
            found = cls(metadata, read_tensors(data), bytes(data))
            _check_tensors(found)
            _check_learning(found)
        except (PolicyFileError, NetworkFileError) as error:
            raise PolicyFileError(f"{source}: {error}") from error
        return found

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read and check a file.

        Raises:
            PolicyFileError: as `from_bytes`, and when it cannot be read.
        """
        try:
            data = path.read_bytes()
        except OSError as error:
            raise PolicyFileError(f"{path}: cannot be read: {error.strerror}") from error
        return cls.from_bytes(data, str(path))


def shipped_directory() -> Path:
    """The folder of the files."""
    return Path(str(resources.files("dynamix.arbitrator.learned"))) / "shipped_policies"


def shipped_names() -> list[str]:
    """The names of the shipped policies, sorted."""
    return sorted(path.stem for path in shipped_directory().glob(f"*{SUFFIX}"))


def shipped_policy(name: str) -> bytes | None:
    """The content of a shipped file, `None` when none has this name."""
    path = shipped_directory() / (check_token(name) + SUFFIX)
    return path.read_bytes() if path.is_file() else None


def _metadata(data: bytes) -> PolicyMetadata:
    text = metadata_text(data)
    try:
        return msgspec.json.decode(text, type=PolicyMetadata)
    except (ValueError, RecursionError) as error:  # a text of half characters cannot even be encoded
        raise PolicyFileError(f"its metadata cannot be read: {error}") from error


def _check_identity(metadata: PolicyMetadata) -> None:
    """The program that learned it and this one must mean the same by every number."""
    check_format(metadata.format)
    if metadata.feature_version > FEATURE_VERSION:
        raise PolicyFileError(
            f"learned on features of version {metadata.feature_version}, this program has version {FEATURE_VERSION}: "
            "use the dynamix-batch that wrote it, or a newer one"
        )
    check_names("rank features", metadata.rank_features, [feature.name for feature in RANK_FEATURES])
    check_names("job features", metadata.global_features, [feature.name for feature in GLOBAL_FEATURES])
    check_names("inputs", metadata.inputs, inputs.names(metadata.action_set))
    check_actions(metadata.actions, ACTIONS[metadata.action_set])


def _check_tensors(file: PolicyFile) -> None:
    metadata = file.metadata
    num_inputs, num_actions = len(metadata.inputs), len(metadata.actions)
    expected = networks.network_shapes(num_inputs, metadata.hidden_sizes, num_actions)
    for head, num_outputs in (("actor", num_actions), ("critic", 1)):
        shapes = networks.shapes(head, 2 * num_inputs, metadata.hidden_sizes, num_outputs)
        if any(name.startswith(f"{OPTIMIZER}{head}.") for name in file.tensors):  # a head that has learned
            expected |= {f"{OPTIMIZER}{name}.{moment}": shape for name, shape in shapes.items() for moment in MOMENTS}
            expected[OPTIMIZER_STEP] = (1,)
    check_tensors(file.tensors, expected)
    foreign = sorted(name for name in file.tensors if name not in expected)
    if foreign:
        raise PolicyFileError(f"tensors that its network does not have: {', '.join(foreign[:4])}")
    for name, value in {**metadata.reward_weights, **metadata.scores}.items():
        if not math.isfinite(value):
            raise PolicyFileError(f"{name} = {value} in its metadata is not finite")


def _check_learning(file: PolicyFile) -> None:
    """Check what would only fail when learning continues, long after the file was accepted."""
    metadata = file.metadata
    try:
        settings = metadata.ppo_settings
    except msgspec.ValidationError as error:
        raise PolicyFileError(f"its settings are not PPO's: {error}") from error
    if (settings.objective, settings.hidden_sizes) != (metadata.algorithm, metadata.hidden_sizes):
        raise PolicyFileError(
            f"its settings are those of another network: {settings.objective}, hidden_sizes {settings.hidden_sizes}, "
            f"where its metadata say {metadata.algorithm}, {metadata.hidden_sizes}"
        )
    for name, array in file.tensors.items():
        if name.startswith(OPTIMIZER) and array.dtype != np.float32:
            raise PolicyFileError(f"tensor {name!r} must be of type F32, as the parameters are")
