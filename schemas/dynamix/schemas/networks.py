"""Networks of learned policies. No torch.

First the file: safetensors, its metadata one JSON text; reading checks everything and runs nothing. Then the network in
numpy and the normalisation of its inputs: float64, and the logits rounded to 1e-9, so that another processor's order of
summation gives the same decisions. The actions that a network chooses among are in `arbitrator/learned`.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Self, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import safetensors

Array = npt.NDArray[Any]
Array32 = npt.NDArray[np.float32]
Array64 = npt.NDArray[np.float64]
Choices = npt.NDArray[np.int64]
Tensors = Mapping[str, npt.NDArray[np.generic]]

FORMAT = 1
METADATA_KEY = "dynamix"
MAX_BYTES = 32 << 20
"""Our networks take a few hundred KB; what is larger is something else."""
_NEVER_NEGATIVE = (".count", ".m2", ".step", ".exp_avg_sq")

_KINDS: dict[str, str] = {"F32": "<f4", "F64": "<f8", "I64": "<i8"}


class Metadata(msgspec.Struct, frozen=True, kw_only=True):
    """Metadata that every network file has; each owner adds its own."""

    inputs: tuple[str, ...]
    """Names, in the order of the network's inputs."""
    actions: tuple[float, ...]
    """Meaning of the network's outputs, in order; the neutral action first."""
    format: int = FORMAT


M = TypeVar("M", bound=Metadata)


class NetworkFileError(ValueError):
    """The file is no network of ours; the message has the fault and the fix."""


def read_network(data: bytes, kind: type[M], what: str) -> tuple[M, dict[str, Array]]:
    """A file's metadata, of a kind with a field `format`, and its tensors; reading runs nothing.

    Raises:
        NetworkFileError: naming `what` it should have been and the fault, or the tensor that is not of finite numbers.
    """
    if len(data) > MAX_BYTES:
        raise NetworkFileError(f"{len(data)} bytes are over the limit of {MAX_BYTES}")
    try:
        found: list[tuple[str, dict[str, Any]]] = safetensors.deserialize(data)  # type: ignore[no-untyped-call]
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])  # it was checked just now
        metadata = msgspec.json.decode(header.get("__metadata__", {}).get(METADATA_KEY, ""), type=kind)
    except safetensors.SafetensorError as error:
        raise NetworkFileError(f"its tensors or metadata cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:  # a text of half characters cannot even be encoded
        raise NetworkFileError(f"not {what}: {error}") from error
    if metadata.format != FORMAT:
        raise NetworkFileError(f"format {metadata.format}, this program reads {FORMAT}")
    tensors: dict[str, Array] = {}
    for name, entry in found:
        if (dtype := _KINDS.get(entry["dtype"])) is None:
            raise NetworkFileError(f"tensor {name!r} is of type {entry['dtype']}: use one of {', '.join(_KINDS)}")
        tensors[name] = np.frombuffer(entry["data"], dtype=dtype).reshape(entry["shape"])
        if not np.isfinite(tensors[name]).all():
            raise NetworkFileError(f"tensor {name!r} holds numbers that are not finite")
    return metadata, tensors


def check_same(what: str, theirs: Sequence[object], ours: Sequence[object]) -> None:
    """Raise NetworkFileError unless a network has exactly the inputs, or the actions, of this program."""
    if tuple(theirs) != tuple(ours):
        unknown = ", ".join(str(name) for name in theirs if name not in ours) or "fewer, or in another order"
        raise NetworkFileError(
            f"its {what} are not those of this program ({unknown}): use the dynamix-batch that wrote it, or learn the "
            "policy again"
        )


def check_tensors(tensors: Mapping[str, Array], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise NetworkFileError unless each expected tensor is there in its shape, and none holds impossible numbers."""
    for name, shape in expected.items():
        found = tensors.get(name)
        if found is None or found.shape != shape:
            raise NetworkFileError(
                f"tensor {name!r} must be of shape {shape}, not {getattr(found, 'shape', 'missing')}"
            )
    for name, array in tensors.items():
        if name.endswith(_NEVER_NEGATIVE) and (array < 0).any():
            raise NetworkFileError(f"tensor {name!r} holds a negative number")


# --- the network

HEADS = ("actor", "critic")
_DECIMALS = 9


class Forward:
    """Two multi-layer perceptrons with tanh between their layers, as `learning.ppo.ActorCritic` learns them."""

    def __init__(self, tensors: Tensors, num_hidden: int) -> None:
        self._last = 2 * num_hidden
        self._tensors = {name: tensor.astype(np.float64) for name, tensor in tensors.items() if name.startswith(HEADS)}

    def logits(self, inputs_DI: Array64) -> Array64:
        """Decisions x actions."""
        return self._outputs("actor", inputs_DI)

    def values(self, inputs_DI: Array64) -> Array64:
        """One expected return per decision."""
        return self._outputs("critic", inputs_DI)[:, 0]

    def _outputs(self, head: str, values: Array64) -> Array64:
        for layer in range(0, self._last + 1, 2):  # torch counts the activations between them, too
            values = values @ self._tensors[f"{head}.{layer}.weight"].T + self._tensors[f"{head}.{layer}.bias"]
            values = values if layer == self._last else np.tanh(values)
        return np.round(values, _DECIMALS)


def log_softmax(logits_DA: Array64) -> Array64:
    """Logarithm of each action's probability."""
    shifted = logits_DA - logits_DA.max(axis=1, keepdims=True)
    result: Array64 = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result


def sample(logprobs_DA: Array64, draws_D: Array64) -> Choices:
    """One action per row: the first one whose cumulated probability exceeds the draw."""
    cumulated = np.exp(logprobs_DA).cumsum(axis=1)
    passed = cumulated <= (draws_D * cumulated[:, -1])[:, None]
    choices: Choices = passed.sum(axis=1).astype(np.int64)
    return choices


def network_shapes(num_inputs: int, hidden_sizes: Sequence[int], num_actions: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors of a network that decides: normalisation, actor, critic."""
    found: dict[str, tuple[int, ...]] = {f"normalisation.{name}": (num_inputs,) for name in ("count", "mean", "m2")}
    for head, num_outputs in zip(HEADS, (num_actions, 1), strict=True):
        found |= shapes(head, 2 * num_inputs, hidden_sizes, num_outputs)
    return found


def shapes(head: str, num_inputs: int, hidden_sizes: Sequence[int], num_outputs: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a head's tensors, as torch names them: layers alternate with activations."""
    widths = [num_inputs, *hidden_sizes, num_outputs]
    found: dict[str, tuple[int, ...]] = {}
    for layer, (fan_in, fan_out) in enumerate(pairwise(widths)):
        found[f"{head}.{2 * layer}.weight"] = (fan_out, fan_in)
        found[f"{head}.{2 * layer}.bias"] = (fan_out,)
    return found


CLIP = 5.0
"""Inputs are clipped at so many standard deviations: a cluster unlike any seen must not give extreme outputs."""

EPSILON = 1e-8


class Normalisation(NamedTuple):
    """Moments of each input over all values known so far (Chan's parallel update, float64); saved with the policy."""

    count_I: Array64
    mean_I: Array64
    m2_I: Array64
    """Sum of squared deviations from the mean."""

    @classmethod
    def empty(cls, num_inputs: int) -> Self:
        """Statistics without any observation: inputs are passed unchanged."""
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

    def applied(self, inputs_NI: Array32) -> Array64:
        """Rows of 2 I numbers: the normalised inputs, 0 where unknown, then one bit per input that is known."""
        known = ~np.isnan(inputs_NI)
        deviation = np.where(self.count_I > 1, np.sqrt(self.m2_I / np.maximum(self.count_I, 1) + EPSILON), 1.0)
        normal = np.clip((inputs_NI.astype(np.float64) - self.mean_I) / np.maximum(deviation, 1e-4), -CLIP, CLIP)
        return np.concatenate([np.where(known, normal, 0.0), known.astype(np.float64)], axis=1)

    def tensors(self) -> dict[str, Array64]:
        """The moments as tensors of a policy file."""
        return {f"normalisation.{name.removesuffix('_I')}": array for name, array in self._asdict().items()}

    @classmethod
    def of_tensors(cls, tensors: Tensors) -> Self:
        """The moments in the tensors of a policy file."""
        return cls(*(tensors[f"normalisation.{name}"].astype(np.float64) for name in ("count", "mean", "m2")))
