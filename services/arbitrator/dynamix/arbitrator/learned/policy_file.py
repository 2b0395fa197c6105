"""A learned policy as a file: safetensors, its metadata one JSON text. Reading checks everything and runs nothing.

Some files come with the package, in `shipped_policies/`: version 1 of their names.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import msgspec
import numpy as np
import numpy.typing as npt
import safetensors
from msgspec import Meta
from safetensors.numpy import save

from dynamix.schemas.features import FEATURE_VERSION, GLOBAL_FEATURES, RANK_FEATURES
from dynamix.schemas.messages.fields import Count, Text, Token
from dynamix.schemas.subjects import check_token

from . import forward, inputs
from .actions import ACTIONS, ActionSet, ActionSetName, action_set_named
from .ppo_settings import PPOSettings

FORMAT = 1
SUFFIX = ".safetensors"
MAX_BYTES = 32 << 20
"""Our networks take a few hundred KB; what is larger is something else."""
METADATA_KEY = "dynamix"
OPTIMIZER = "optimizer."
"""Prefix of the tensors with which learning continues: Adam's moments of each parameter, and its steps so far."""
OPTIMIZER_STEP = OPTIMIZER + "step"
MOMENTS = ("exp_avg", "exp_avg_sq")
_NEVER_NEGATIVE = (".count", ".m2", ".step", ".exp_avg_sq")

Array = npt.NDArray[Any]
_KINDS: dict[str, str] = {"F32": "<f4", "F64": "<f8", "I64": "<i8"}

SHIPPED_POLICIES = ("ppo", "ppo-paper")
"""The learned policies. NAME.safetensors is what a job of that name gets, NAME-SEED.safetensors the same learning begun
with another seed: the policy seeds of a comparison."""

SHIPPED_VERSION = 1
"""Versions on the bus are higher, so that a name and a number never mean two policies."""


class PolicyFileError(ValueError):
    """A policy file that cannot be used; the text says what is wrong with it and how to fix it."""


class PolicyMetadata(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a policy is, where it comes from and what it is worth."""

    policy: Token
    """The name that a job's specification chooses it by."""
    action_set: ActionSetName
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
    """What the network's outputs mean, in their order; the neutral action first."""

    @classmethod
    def of(cls, *, action_set: ActionSetName, **fields: Any) -> Self:
        """Metadata of a policy of this program: its inputs and actions are filled in."""
        return cls(action_set=action_set, inputs=inputs.names(action_set), actions=ACTIONS[action_set], **fields)

    def make_action_set(self) -> ActionSet:
        """The action set that shows the file's own inputs and takes its own actions."""
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
            found = cls(metadata, _tensors(data), bytes(data))
            _check_tensors(found)
            _check_learning(found)
        except PolicyFileError as error:
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
    if len(data) > MAX_BYTES:
        raise PolicyFileError(f"{len(data)} bytes are over the limit of {MAX_BYTES}")
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > len(data) - 8:
        raise PolicyFileError("not a safetensors file, or cut off: its header is not there")
    try:
        header: Any = json.loads(data[8 : 8 + length])
        text = header["__metadata__"][METADATA_KEY]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise PolicyFileError(f"not a policy file of DYNAMIX: its header has no {METADATA_KEY!r} metadata") from error
    if not isinstance(text, str):
        raise PolicyFileError(f"not a policy file of DYNAMIX: its {METADATA_KEY!r} metadata is not a text")
    try:
        return msgspec.json.decode(text, type=PolicyMetadata)
    except (ValueError, RecursionError) as error:  # a text of half characters cannot even be encoded
        raise PolicyFileError(f"its metadata cannot be read: {error}") from error


def _check_identity(metadata: PolicyMetadata) -> None:
    """The program that learned it and this one must mean the same by every number."""
    if metadata.format != FORMAT:
        raise PolicyFileError(f"format {metadata.format}, this program reads {FORMAT}")
    if metadata.feature_version > FEATURE_VERSION:
        raise PolicyFileError(
            f"learned on features of version {metadata.feature_version}, this program has version {FEATURE_VERSION}: "
            "use the dynamix-batch that wrote it, or a newer one"
        )
    _check_names("rank features", metadata.rank_features, [feature.name for feature in RANK_FEATURES])
    _check_names("job features", metadata.global_features, [feature.name for feature in GLOBAL_FEATURES])
    _check_names("inputs", metadata.inputs, inputs.names(metadata.action_set))
    actions = ACTIONS[metadata.action_set]
    _check_names("actions", metadata.actions, actions)
    if metadata.actions[0] != actions[0]:
        raise PolicyFileError(f"its first action is {metadata.actions[0]:g}, not the neutral one, {actions[0]:g}")


def _check_names(what: str, theirs: Sequence[object], ours: Sequence[object]) -> None:
    """A file may lack what this program has, as one that is older does; what it names must be there."""
    if unknown := [str(name) for name in theirs if name not in ours]:
        raise PolicyFileError(
            f"its list of {what} names {', '.join(unknown)}, which this program does not have: use the dynamix-batch "
            "that wrote it or a newer one, or learn the policy again"
        )
    if not theirs or len(set(theirs)) < len(theirs):
        raise PolicyFileError(f"its list of {what} is empty or names something twice")


def _tensors(data: bytes) -> dict[str, Array]:
    try:
        return {name: _array(name, entry) for name, entry in safetensors.deserialize(data)}  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        raise PolicyFileError(f"its tensors cannot be read: {error}") from error


def _array(name: str, entry: dict[str, Any]) -> Array:
    kind = _KINDS.get(entry["dtype"])
    if kind is None:
        raise PolicyFileError(f"tensor {name!r} is of type {entry['dtype']}: use one of {', '.join(_KINDS)}")
    array = np.frombuffer(entry["data"], dtype=kind).reshape(entry["shape"])
    if not np.isfinite(array).all():
        raise PolicyFileError(f"tensor {name!r} holds numbers that are not finite")
    return array


def _check_tensors(file: PolicyFile) -> None:
    num_inputs, num_actions = len(file.metadata.inputs), len(file.metadata.actions)
    expected: dict[str, tuple[int, ...]] = {f"normalisation.{name}": (num_inputs,) for name in ("count", "mean", "m2")}
    for head, num_outputs in (("actor", num_actions), ("critic", 1)):
        shapes = forward.shapes(head, 2 * num_inputs, file.metadata.hidden_sizes, num_outputs)
        expected |= shapes
        if any(name.startswith(f"{OPTIMIZER}{head}.") for name in file.tensors):  # a head that has learned
            expected |= {f"{OPTIMIZER}{name}.{moment}": shape for name, shape in shapes.items() for moment in MOMENTS}
            expected[OPTIMIZER_STEP] = (1,)
    for name, shape in expected.items():
        found = file.tensors.get(name)
        if found is None or found.shape != shape:
            raise PolicyFileError(f"tensor {name!r} must be of shape {shape}, not {getattr(found, 'shape', 'missing')}")
    foreign = sorted(name for name in file.tensors if name not in expected)
    if foreign:
        raise PolicyFileError(f"tensors that its network does not have: {', '.join(foreign[:4])}")
    for name, array in file.tensors.items():
        if name.endswith(_NEVER_NEGATIVE) and (array < 0).any():
            raise PolicyFileError(f"tensor {name!r} holds a negative number")
    for name, value in {**file.metadata.reward_weights, **file.metadata.scores}.items():
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
