"""PPO's update a second time: what the real one must equal.

One sample at a time, in float64, written from the papers' formulas.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt
import torch

from dynamix.arbitrator.learned.policy_file import PPOSettings


class PlainPPO:
    """Parameters by name, and Adam."""

    def __init__(
        self, parameters: Mapping[str, npt.NDArray[Any]], num_actions: Sequence[int], settings: PPOSettings
    ) -> None:
        self._tensors = {name: torch.tensor(array).double().requires_grad_() for name, array in parameters.items()}
        self._adam = torch.optim.Adam(self._tensors.values(), eps=settings.adam_eps)
        self._num_hidden = len(settings.hidden_sizes)
        self._num_actions = list(num_actions)
        self._settings = settings

    @property
    def parameters(self) -> dict[str, npt.NDArray[Any]]:
        return {name: tensor.detach().numpy() for name, tensor in self._tensors.items()}

    def step(self, batch: Sequence[npt.NDArray[Any]], learning_rate: float) -> None:
        """One step; arrays of one minibatch: inputs, actions, logprobs, advantages, returns, values."""
        s = self._settings
        inputs, actions, logprobs, advantages, returns, values = (torch.tensor(column).double() for column in batch)
        if s.norm_adv and len(advantages) > 1:
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        rows = zip(inputs, actions.long(), logprobs, advantages, returns, values, strict=True)
        self._adam.zero_grad()
        torch.stack([self._loss(row) for row in rows]).mean().backward()
        torch.nn.utils.clip_grad_norm_(self._tensors.values(), s.max_grad_norm)
        self._adam.param_groups[0]["lr"] = learning_rate
        self._adam.step()

    def _loss(self, row: Sequence[torch.Tensor]) -> torch.Tensor:
        x, actions, old_logprob, advantage, target, old_value = row
        s, logprob, entropy = self._settings, torch.zeros(()), torch.zeros(())
        for action, logits in zip(actions, self._forward("actor", x).split(self._num_actions), strict=True):
            logprobs = logits.log_softmax(0)
            logprob, entropy = logprob + logprobs[action], entropy - (logprobs.exp() * logprobs).sum()
        ratio = (logprob - old_logprob).exp()
        if s.objective == "simplified":
            return -ratio * target - s.ent_coef * entropy
        surrogate = -torch.minimum(ratio * advantage, ratio.clamp(1 - s.clip_coef, 1 + s.clip_coef) * advantage)
        value = self._forward("critic", x)[0]
        error = (value - target) ** 2
        if s.clip_vloss:
            bounded = old_value + (value - old_value).clamp(-s.clip_coef, s.clip_coef)
            error = torch.maximum(error, (bounded - target) ** 2)
        return surrogate - s.ent_coef * entropy + s.vf_coef * 0.5 * error

    def _forward(self, head: str, x: torch.Tensor) -> torch.Tensor:
        for layer in range(self._num_hidden + 1):
            weight, bias = (self._tensors[f"{head}.{2 * layer}.{name}"] for name in ("weight", "bias"))
            x = weight @ (x.tanh() if layer else x) + bias
        return x
