"""The network in numpy: what a policy needs to decide, without torch.

float64, and the logits rounded to 1e-9: another processor's order of summation gives the same decisions.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from dynamix.arbitrator.policies.model.observation import Array64

Tensors = Mapping[str, npt.NDArray[np.generic]]
HEADS = ("actor", "critic")
_DECIMALS = 9


class Forward:
    """Two multi-layer perceptrons with tanh between their layers, as `network.ActorCritic` learns them."""

    def __init__(self, tensors: Tensors, num_hidden: int) -> None:
        self._layers = {head: _layers(tensors, head, num_hidden + 1) for head in HEADS}

    def logits(self, inputs_DI: Array64) -> Array64:
        """Decisions x actions."""
        return np.round(_perceptron(self._layers["actor"], inputs_DI), _DECIMALS)

    def values(self, inputs_DI: Array64) -> Array64:
        """One expected return per decision."""
        return np.round(_perceptron(self._layers["critic"], inputs_DI)[:, 0], _DECIMALS)


def log_softmax(logits_DA: Array64) -> Array64:
    """Logarithm of each action's probability."""
    shifted = logits_DA - logits_DA.max(axis=1, keepdims=True)
    result: Array64 = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result


def shapes(head: str, num_inputs: int, hidden_sizes: Sequence[int], num_outputs: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a head's tensors, as torch names them: layers alternate with activations."""
    widths = [num_inputs, *hidden_sizes, num_outputs]
    found: dict[str, tuple[int, ...]] = {}
    for layer, (fan_in, fan_out) in enumerate(pairwise(widths)):
        found[f"{head}.{2 * layer}.weight"] = (fan_out, fan_in)
        found[f"{head}.{2 * layer}.bias"] = (fan_out,)
    return found


def _layers(tensors: Tensors, head: str, num_layers: int) -> list[tuple[Array64, Array64]]:
    return [
        (
            tensors[f"{head}.{2 * layer}.weight"].astype(np.float64).T,
            tensors[f"{head}.{2 * layer}.bias"].astype(np.float64),
        )
        for layer in range(num_layers)
    ]


def _perceptron(layers: list[tuple[Array64, Array64]], inputs_DI: Array64) -> Array64:
    *hidden, (last_weight, last_bias) = layers
    values = inputs_DI
    for weight, bias in hidden:
        values = np.tanh(values @ weight + bias)
    return values @ last_weight + last_bias
