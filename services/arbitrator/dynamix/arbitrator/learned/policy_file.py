"""A learned policy as a file: weights in safetensors, what they mean as one JSON text. Reading runs nothing.

Some files come with the package, in `shipped_policies/`: version 1 of their names.
"""

import hashlib
import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Self

import msgspec
import numpy as np
from msgspec import Meta
from safetensors.numpy import save

from dynamix.schemas import networks
from dynamix.schemas.messages.allocation import Count, Text, Token
from dynamix.schemas.networks import METADATA_KEY, Array, Metadata, NetworkFileError, check_tensors, read_network
from dynamix.schemas.subjects import check_token

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

ActionSetName = Literal["deltas", "global"]
Objective = Literal["clipped", "simplified"]
Share = Annotated[float, Meta(ge=0, le=1)]
Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
AtLeastOne = Annotated[int, Meta(ge=1)]


class PPOSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that an update depends on, by cleanrl's names.

    None of it is published (method section 3): these are the field's defaults.
    """

    objective: Objective = "clipped"
    learning_rate: Positive = 1e-3
    anneal_lr: bool = True
    """Reduce the learning rate linearly to 0 over the planned episodes."""
    adam_eps: Positive = 1e-5
    """Adam's epsilon: cleanrl's, not torch's."""
    gamma: Share = 0.995
    """Discount per window: 0.995 looks some 200 windows ahead, the length of a run."""
    gae_lambda: Share = 0.95
    """Between the critic alone (0) and the rewards alone (1)."""
    num_minibatches: AtLeastOne = 4
    """Parts of a batch, one optimizer step each."""
    update_epochs: AtLeastOne = 8
    norm_adv: bool = True
    clip_coef: Positive = 0.2
    """Change of a probability ratio at which its gradient is clipped."""
    clip_vloss: bool = True
    """Cut off the critic's change in the same way."""
    ent_coef: NotNegative = 0.01
    vf_coef: NotNegative = 0.5
    max_grad_norm: Positive = 0.5
    target_kl: Positive | None = 0.02
    """Ends the passes over a batch when the policy has moved further than this; `None`: never."""
    hidden_sizes: Annotated[tuple[Annotated[int, Meta(ge=1, le=4096)], ...], Meta(max_length=8)] = (64, 64)
    neutral_logit: float = 1.0
    """The neutral action's initial advantage: untrained, it is chosen about e times as often as each other one."""


PAPER = PPOSettings(
    objective="simplified",
    learning_rate=3e-3,
    num_minibatches=1,
    update_epochs=4,
    ent_coef=0.0,
    target_kl=None,
    anneal_lr=False,
    neutral_logit=0.0,
)
"""The paper's variant as its text describes it: plain policy-gradient steps at the end of each episode. Their number
and size are ours: with fewer or smaller ones the policy hardly moves in the 15 episodes that the paper speaks of."""


class PolicyMetadata(Metadata, frozen=True, kw_only=True):
    """Metadata of a learned policy: its form, origin and score; `policy.metadata_of` makes them."""

    policy: Token
    """The name that a job's specification chooses it by."""
    action_set: ActionSetName
    settings: PPOSettings = PPOSettings()
    reward_formula: Text
    """`auto`: the published one for each job's optimizer."""
    reward_weights: dict[str, float] = msgspec.field(default_factory=dict)
    num_updates: Count = 0
    num_episodes: Count = 0
    scenarios: tuple[Text, ...] = ()
    seeds: tuple[Count, ...] = ()
    scores: dict[str, float] = msgspec.field(default_factory=dict)
    """Scores by name, as measured at the end of learning; lower is better for times and ratios."""
    learned_from: tuple[Text, ...] = ()
    """The newest live runs, `<job>:<generation>`, that this version learned from."""
    parent: Text = ""
    """SHA-256 of the file that the learning continued from; empty for a new policy."""
    created_by: Text = ""


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
        """Read a file's content, and check that the tensors are those of its network.

        Raises:
            NetworkFileError: naming `source` and what does not fit.
        """
        try:
            metadata, tensors = read_network(data, PolicyMetadata, "a policy file of DYNAMIX")
            _check_tensors(metadata, tensors)
        except NetworkFileError as error:
            raise NetworkFileError(f"{source}: {error}") from error
        return cls(metadata, tensors, bytes(data))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read and check a file.

        Raises:
            NetworkFileError: as `from_bytes`, and when it cannot be read.
        """
        try:
            data = path.read_bytes()
        except OSError as error:
            raise NetworkFileError(f"{path}: cannot be read: {error.strerror}") from error
        return cls.from_bytes(data, str(path))


def _check_tensors(metadata: PolicyMetadata, tensors: Mapping[str, Array]) -> None:
    num_inputs, hidden_sizes, num_actions = len(metadata.inputs), metadata.settings.hidden_sizes, len(metadata.actions)
    expected = networks.network_shapes(num_inputs, hidden_sizes, num_actions)
    for head, num_outputs in (("actor", num_actions), ("critic", 1)):
        if any(name.startswith(f"{OPTIMIZER}{head}.") for name in tensors):  # a head that has learned
            for name, shape in networks.shapes(head, 2 * num_inputs, hidden_sizes, num_outputs).items():
                expected |= {f"{OPTIMIZER}{name}.{moment}": shape for moment in MOMENTS}
            expected[OPTIMIZER_STEP] = (1,)
    check_tensors(tensors, expected)
    if foreign := sorted(tensors.keys() - expected.keys()):
        raise NetworkFileError(f"tensors that its network does not have: {', '.join(foreign[:4])}")
    for name, array in tensors.items():
        if name.startswith(OPTIMIZER) and array.dtype != np.float32:
            raise NetworkFileError(f"tensor {name!r} must be of type F32, as the parameters are")


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
