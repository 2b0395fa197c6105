"""The network that learns: actor and critic apart, shared by all workers (torch; `forward` is the same in numpy)."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

HIDDEN_GAIN = 2**0.5
ACTOR_GAIN = 0.01
"""Gain of the actor's last layer: all actions are about equally likely at first."""
CRITIC_GAIN = 1.0


class ActorCritic(nn.Module):
    """Two perceptrons with tanh, initialised orthogonally (the canonical details of PPO)."""

    def __init__(
        self,
        num_inputs: int,
        num_actions: int,
        hidden_sizes: Sequence[int],
        *,
        generator: torch.Generator,
        neutral_logit: float = 0.0,
    ) -> None:
        """Make the network; `neutral_logit` is the first action's initial advantage over the others."""
        super().__init__()
        self.actor = _perceptron(num_inputs, hidden_sizes, num_actions, ACTOR_GAIN, generator)
        self.critic = _perceptron(num_inputs, hidden_sizes, 1, CRITIC_GAIN, generator)
        last = self.actor[-1]
        assert isinstance(last, nn.Linear)
        with torch.no_grad():
            last.bias[0] = neutral_logit

    def evaluate(self, inputs_NI: Tensor, actions_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities of the actions, entropies, values: one of each per decision."""
        logprobs_NA = torch.log_softmax(self.actor(inputs_NI), dim=1)
        entropies = -(logprobs_NA.exp() * logprobs_NA).sum(dim=1)
        return logprobs_NA.gather(1, actions_N[:, None])[:, 0], entropies, self.critic(inputs_NI)[:, 0]

    def tensors(self) -> dict[str, npt.NDArray[np.float32]]:
        """The parameters by name, as a policy file keeps them."""
        return {name: value.detach().numpy().copy() for name, value in self.state_dict().items()}


def _perceptron(
    num_inputs: int, hidden_sizes: Sequence[int], num_outputs: int, gain: float, generator: torch.Generator
) -> nn.Sequential:
    layers: list[nn.Module] = []
    for size in hidden_sizes:
        layers += [_linear(num_inputs, size, HIDDEN_GAIN, generator), nn.Tanh()]
        num_inputs = size
    return nn.Sequential(*layers, _linear(num_inputs, num_outputs, gain, generator))


def _linear(num_inputs: int, num_outputs: int, gain: float, generator: torch.Generator) -> nn.Linear:
    layer = nn.Linear(num_inputs, num_outputs, device="meta").to_empty(
        device="cpu"
    )  # no draw from the global generator
    with torch.no_grad():
        nn.init.orthogonal_(layer.weight, gain, generator=generator)
        layer.bias.zero_()
    return layer
