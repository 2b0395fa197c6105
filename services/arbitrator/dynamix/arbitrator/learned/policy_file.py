"""A learned policy as a file, and the network that it holds. No torch; reading a file runs nothing.

The file is safetensors, its metadata one JSON text; reading checks everything. The network and the normalisation of its
inputs are numpy: float64, and the logits rounded to 1e-9, so that another processor's order of summation gives the same
decisions. The actions that a network chooses among are in `policy`.

Some files come with the package, in `shipped_policies/`: version 1 of their names.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import msgspec
import numpy as np
import numpy.typing as npt
import safetensors.numpy
from msgspec import Meta

from dynamix.arbitrator.policies.policy import Array32, Array64
from dynamix.schemas.messages.allocation import Count, Text, Token
from dynamix.schemas.subjects import check_token

Array = npt.NDArray[Any]
Choices = npt.NDArray[np.int64]
Tensors = Mapping[str, npt.NDArray[np.generic]]

FORMAT = 1
METADATA_KEY = "dynamix"
MAX_BYTES = 32 << 20
"""Our networks take a few hundred KB; what is larger is something else."""
_NEVER_NEGATIVE = (".count", ".m2", ".step", ".exp_avg_sq")

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

ActionSetName = Literal["deltas", "levers"]
Objective = Literal["clipped", "simplified"]
Share = Annotated[float, Meta(ge=0, le=1)]
Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
AtLeastOne = Annotated[int, Meta(ge=1)]


class PolicyFileError(ValueError):
    """The file is not a policy file of this program; the message has the fault and the fix."""


class PPOSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that an update depends on, by cleanrl's names.

    None of it is published (method section 3): these are the field's defaults.
    """

    objective: Objective = "clipped"
    learning_rate: Positive = 2e-3
    anneal_lr: bool = True
    """Reduce the learning rate linearly to 0 over the planned episodes."""
    adam_eps: Positive = 1e-5
    """Adam's epsilon: cleanrl's, not torch's."""
    gamma: Share = 0.95
    """Discount per window: 0.95 looks some 20 windows ahead."""
    gae_lambda: Share = 0.95
    """Between the critic alone (0) and the rewards alone (1)."""
    num_minibatches: AtLeastOne = 8
    """Parts of a batch, one optimizer step each."""
    update_epochs: AtLeastOne = 4
    norm_adv: bool = True
    clip_coef: Positive = 0.2
    """Change of a probability ratio at which its gradient is clipped."""
    clip_vloss: bool = False
    """Cut off the critic's change in the same way."""
    ent_coef: NotNegative = 0.003
    vf_coef: NotNegative = 0.5
    max_grad_norm: Positive = 0.5
    target_kl: Positive | None = 0.03
    """Ends the passes over a batch when the policy has moved further than this; `None`: never."""
    hidden_sizes: Annotated[tuple[Annotated[int, Meta(ge=1, le=4096)], ...], Meta(max_length=8)] = (64, 64)
    neutral_logit: float = 1.0
    """The neutral action's initial advantage: untrained, it is chosen about e times as often as each other one."""


class UpdateStats(msgspec.Struct, frozen=True, kw_only=True):
    """An update in numbers; losses and diagnostics are means over its minibatches."""

    loss: float
    policy_loss: float
    value_loss: float
    entropy: float
    approx_kl: float
    """E[(ratio - 1) - log ratio], Schulman's low-variance estimate."""
    clipfrac: float
    """Share of decisions whose ratio left 1 +- clip_coef."""
    learning_rate: float
    num_steps: int
    """Optimizer steps taken; fewer than planned when `target_kl` ended the update."""
    explained_variance: float | None
    """1 - Var(returns - values) / Var(returns) before the critic learned from this batch: 1 is a perfect critic, 0 an
    uninformative one; `None` without variance, or a critic that learns."""
    num_decisions: int


class PolicyMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """Metadata of a learned policy: its form, origin and score; `policy.metadata_of` makes them."""

    inputs: tuple[str, ...]
    """Names, in the order of the network's inputs."""
    actions: tuple[tuple[float, ...], ...]
    """Meaning of the network's outputs, in order: the actions of each lever, the neutral one first."""
    format: int = FORMAT
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
        return safetensors.numpy.save(little, {METADATA_KEY: text})

    @property
    def digest(self) -> str:
        """SHA-256 of the content, in hexadecimal."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @classmethod
    def from_bytes(cls, data: bytes, source: str = "policy file") -> Self:
        """Read a file's content, and check that the tensors are those of its network.

        Raises:
            PolicyFileError: naming `source` and what does not fit.
        """
        try:
            metadata, tensors = _content_of(data)
            _check_tensors(metadata, tensors)
        except PolicyFileError as error:
            raise PolicyFileError(f"{source}: {error}") from error
        return cls(metadata, tensors, bytes(data))


def _content_of(data: bytes) -> tuple[PolicyMetadata, dict[str, Array]]:
    if len(data) > MAX_BYTES:
        raise PolicyFileError(f"{len(data)} bytes are over the limit of {MAX_BYTES}")
    try:
        tensors = safetensors.numpy.load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])  # it was checked just now
        metadata = msgspec.json.decode(header.get("__metadata__", {}).get(METADATA_KEY, ""), type=PolicyMetadata)
    except safetensors.SafetensorError as error:
        raise PolicyFileError(f"its tensors or metadata cannot be read: {error}") from error
    except (ValueError, LookupError, RecursionError) as error:  # a text of half characters cannot even be encoded
        raise PolicyFileError(f"not a policy file of DYNAMIX: {error}") from error
    if metadata.format != FORMAT:
        raise PolicyFileError(f"format {metadata.format}, this program reads {FORMAT}")
    for name, array in tensors.items():
        if array.dtype not in (np.float32, np.float64, np.int64):
            raise PolicyFileError(f"{name} is of type {array.dtype}: use float32, float64 or int64")
        if not np.isfinite(array).all():
            raise PolicyFileError(f"tensor {name!r} holds numbers that are not finite")
        if name.endswith(_NEVER_NEGATIVE) and (array < 0).any():
            raise PolicyFileError(f"tensor {name!r} holds a negative number")
    return metadata, tensors


def _check_tensors(metadata: PolicyMetadata, tensors: Mapping[str, Array]) -> None:
    num_inputs = len(metadata.inputs)
    expected: dict[str, tuple[int, ...]] = {f"normalisation.{name}": (num_inputs,) for name in MOMENTS_OF_INPUTS}
    for head, num_outputs in zip(HEADS, (sum(map(len, metadata.actions)), 1), strict=True):
        own: dict[str, tuple[int, ...]] = {}  # as torch names them: layers alternate with activations
        widths = pairwise([2 * num_inputs, *metadata.settings.hidden_sizes, num_outputs])
        for layer, (fan_in, fan_out) in enumerate(widths):
            own |= {f"{head}.{2 * layer}.weight": (fan_out, fan_in), f"{head}.{2 * layer}.bias": (fan_out,)}
        expected |= own
        if any(name.startswith(f"{OPTIMIZER}{head}.") for name in tensors):  # a head that has learned
            for moment in MOMENTS:
                expected |= {f"{OPTIMIZER}{name}.{moment}": shape for name, shape in own.items()}
            expected[OPTIMIZER_STEP] = (1,)
    for name, shape in expected.items():
        found = tensors.get(name)
        if found is None or found.shape != shape:
            raise PolicyFileError(f"tensor {name!r} must be of shape {shape}, not {getattr(found, 'shape', 'missing')}")
    if foreign := sorted(tensors.keys() - expected.keys()):
        raise PolicyFileError(f"tensors that its network does not have: {', '.join(foreign[:4])}")
    for name, array in tensors.items():
        if name.startswith(OPTIMIZER) and array.dtype != np.float32:
            raise PolicyFileError(f"tensor {name!r} must be of type F32, as the parameters are")


# --- the network

HEADS = ("actor", "critic")
_DECIMALS = 9
CLIP = 5.0
"""Inputs are clipped at so many standard deviations: a cluster unlike any seen must not give extreme outputs."""
LEAST_DEVIATION = 1e-4
MOMENTS_OF_INPUTS = ("count", "mean", "m2")


def log_softmax(logits_DA: Array64) -> Array64:
    """Logarithm of each action's probability."""
    shifted = logits_DA - logits_DA.max(axis=1, keepdims=True)
    result: Array64 = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result


def sample(logits: Sequence[Array64], draws_DL: Array64) -> tuple[Choices, Array64]:
    """One action per decision and lever, and the log-probability of each decision: a sum, as levers are independent.

    An action is the first one whose cumulated probability exceeds the draw.
    """
    chosen, logprobs_D = [], np.zeros(len(draws_DL))
    for logits_DA, draws_D in zip(logits, draws_DL.T, strict=True):
        logprobs_DA = log_softmax(logits_DA)
        cumulated = np.exp(logprobs_DA).cumsum(axis=1)
        choices = (cumulated <= (draws_D * cumulated[:, -1])[:, None]).sum(axis=1).astype(np.int64)
        chosen.append(choices)
        logprobs_D += logprobs_DA[np.arange(len(choices)), choices]
    return np.stack(chosen, axis=1), logprobs_D


class Normalisation(NamedTuple):
    """Moments of each input over all values known so far (Chan's parallel update, float64); saved with the policy."""

    count_I: Array64
    mean_I: Array64
    m2_I: Array64
    """Sum of squared deviations from the mean."""

    @classmethod
    def empty(cls, num_inputs: int) -> Self:
        """Statistics without any observation: all inputs count as unknown."""
        return cls(np.zeros(num_inputs), np.zeros(num_inputs), np.zeros(num_inputs))

    def updated(self, inputs_NI: Array32) -> "Normalisation":
        """The moments with the known values of more rows added."""
        values, known = inputs_NI.astype(np.float64), ~np.isnan(inputs_NI)
        num = known.sum(axis=0).astype(np.float64)
        mean = np.where(known, values, 0.0).sum(axis=0) / np.maximum(num, 1)
        m2 = np.where(known, values - mean, 0.0) ** 2
        total = self.count_I + num
        shift, share = mean - self.mean_I, num / np.maximum(total, 1)
        return Normalisation(
            total,
            self.mean_I + shift * share,
            self.m2_I + m2.sum(axis=0) + shift**2 * self.count_I * share,
        )

    @property
    def deviation_I(self) -> Array64:  # noqa: N802 - I is its shape
        """Standard deviation of each input; 0 where none is known."""
        return np.sqrt(self.m2_I / np.maximum(self.count_I, 1))

    def applied(self, inputs_NI: Array32) -> Array64:
        """Rows of 2 I numbers: the normalised inputs, 0 where unknown, then one bit per input that is known.

        An input that never varied taught nothing, and counts as unknown.
        """
        varied = self.deviation_I > LEAST_DEVIATION
        known = ~np.isnan(inputs_NI) & varied
        deviation = np.where(varied, self.deviation_I, 1.0)
        normal = np.clip((inputs_NI.astype(np.float64) - self.mean_I) / deviation, -CLIP, CLIP)
        return np.concatenate([np.where(known, normal, 0.0), known.astype(np.float64)], axis=1)

    def tensors(self) -> dict[str, Array64]:
        """The moments as tensors of a policy file."""
        return {f"normalisation.{name.removesuffix('_I')}": array for name, array in self._asdict().items()}

    @classmethod
    def of_tensors(cls, tensors: Tensors) -> Self:
        """The moments in the tensors of a policy file."""
        return cls(*(tensors[f"normalisation.{name}"].astype(np.float64) for name in MOMENTS_OF_INPUTS))


class Network:
    """Two multi-layer perceptrons with tanh between their layers, as `learning.ppo.ActorCritic` learns them."""

    def __init__(self, file: PolicyFile) -> None:
        self._ends = np.cumsum([len(each) for each in file.metadata.actions])[:-1]
        self._last = 2 * len(file.metadata.settings.hidden_sizes)
        self._tensors = {name: each.astype(np.float64) for name, each in file.tensors.items() if name.startswith(HEADS)}
        self._normalisation = Normalisation.of_tensors(file.tensors)

    def choose(self, inputs_DI: Array32, random: np.random.Generator | None = None) -> tuple[Choices, Array64, Array64]:
        """Choices of all levers, decisions x levers; of each decision the log-probability, and the expected return.

        They are drawn; without `random` the likeliest are taken, of equal ones the first, and the numbers are zeros.
        """
        inputs = self._normalisation.applied(inputs_DI)
        logits = self.logits(inputs)
        if random is None:
            likeliest = np.stack([logits_DA.argmax(axis=1) for logits_DA in logits], axis=1)
            return likeliest, np.zeros(len(inputs)), np.zeros(len(inputs))
        return *sample(logits, random.random((len(inputs), len(logits)))), self.values(inputs)

    def logits(self, normal_DI: Array64) -> list[Array64]:
        """The outputs of each lever for normalised inputs: decisions x its actions."""
        return np.split(self._outputs("actor", normal_DI), self._ends, axis=1)

    def values(self, normal_DI: Array64) -> Array64:
        """One expected return per decision."""
        return self._outputs("critic", normal_DI)[:, 0]

    def _outputs(self, head: str, values: Array64) -> Array64:
        for layer in range(0, self._last + 1, 2):  # torch counts the activations between them, too
            values = values @ self._tensors[f"{head}.{layer}.weight"].T + self._tensors[f"{head}.{layer}.bias"]
            values = values if layer == self._last else np.tanh(values)
        return np.round(values, _DECIMALS)


# --- the files of the package


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
