"""PPO's update a second time, in plain numpy loops with gradients by hand: what the torch one must equal.

One sample at a time, float64, no automatic differentiation, written from the papers' formulas.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dynamix.arbitrator.learned.policy_file import PPOSettings

Array = npt.NDArray[np.float64]
Parameters = dict[str, Array]


class PlainPPO:
    """Parameters by torch's names, and Adam's moments."""

    def __init__(self, parameters: Mapping[str, npt.NDArray[Any]], num_hidden: int, settings: PPOSettings) -> None:
        self.parameters: Parameters = {name: array.astype(np.float64) for name, array in parameters.items()}
        self._layers = range(num_hidden + 1)
        self._settings = settings
        self._first = {name: np.zeros_like(array) for name, array in self.parameters.items()}
        self._second = {name: np.zeros_like(array) for name, array in self.parameters.items()}
        self._num_steps = 0

    def loss_and_gradient(self, batch: Sequence[npt.NDArray[Any]]) -> tuple[float, Parameters]:
        """Arrays of one minibatch: inputs, actions, logprobs, advantages, returns, values."""
        s = self._settings
        inputs, actions, old_logprobs, advantages, returns, old_values = batch
        advantages = advantages.astype(np.float64)
        if s.objective == "clipped" and s.norm_adv and len(advantages) > 1:
            mean = sum(advantages) / len(advantages)
            deviation = (sum((a - mean) ** 2 for a in advantages) / (len(advantages) - 1)) ** 0.5
            advantages = np.array([(a - mean) / (deviation + 1e-8) for a in advantages])
        gradient = {name: np.zeros_like(array) for name, array in self.parameters.items()}
        loss = 0.0
        for n in range(len(actions)):
            x, action = inputs[n].astype(np.float64), int(actions[n])
            logits, actor_trace = self._forward("actor", x)
            probabilities = np.exp(logits - logits.max())
            probabilities /= probabilities.sum()
            logprobs = np.log(probabilities)
            ratio = np.exp(logprobs[action] - float(old_logprobs[n]))
            one_hot = np.eye(len(logits))[action]
            weight = advantages[n] if s.objective == "clipped" else float(returns[n])
            surrogate, active = self._surrogate(ratio, weight)
            entropy = -(probabilities * logprobs).sum()
            loss += (surrogate - s.ent_coef * entropy) / len(actions)
            d_logits = -active * weight * ratio * (one_hot - probabilities)
            d_logits += s.ent_coef * probabilities * (logprobs + entropy)
            self._backward("actor", actor_trace, d_logits / len(actions), gradient)
            if s.objective == "clipped":
                loss += self._critic(x, float(returns[n]), float(old_values[n]), len(actions), gradient)
        return loss, gradient

    def step(self, batch: Sequence[npt.NDArray[Any]], learning_rate: float) -> None:
        """One step: global gradient clipping, then Adam."""
        _, gradient = self.loss_and_gradient(batch)
        norm = sum((array**2).sum() for array in gradient.values()) ** 0.5
        scale = min(1.0, self._settings.max_grad_norm / (norm + 1e-6))
        self._num_steps += 1
        for name, array in gradient.items():
            clipped = array * scale
            self._first[name] = 0.9 * self._first[name] + 0.1 * clipped
            self._second[name] = 0.999 * self._second[name] + 0.001 * clipped**2
            first = self._first[name] / (1 - 0.9**self._num_steps)
            second = self._second[name] / (1 - 0.999**self._num_steps)
            self.parameters[name] -= learning_rate * first / (np.sqrt(second) + self._settings.adam_eps)

    def _surrogate(self, ratio: float, weight: float) -> tuple[float, float]:
        """Loss, and whether the ratio's gradient counts."""
        if self._settings.objective == "simplified":
            return -ratio * weight, 1.0
        clip = self._settings.clip_coef
        bounded = min(max(ratio, 1 - clip), 1 + clip)
        free, held = -ratio * weight, -bounded * weight
        return max(free, held), 1.0 if free > held or ratio == bounded else 0.0

    def _critic(self, x: Array, target: float, old: float, num: int, gradient: Parameters) -> float:
        s = self._settings
        outputs, trace = self._forward("critic", x)
        value = float(outputs[0])
        loss, slope = (value - target) ** 2, 2 * (value - target)
        if s.clip_vloss:
            bounded = old + min(max(value - old, -s.clip_coef), s.clip_coef)
            held = (bounded - target) ** 2
            if held > loss:
                loss, slope = held, 0.0 if bounded != value else slope
        self._backward("critic", trace, np.array([s.vf_coef * 0.5 * slope / num]), gradient)
        return s.vf_coef * 0.5 * loss / num

    def _forward(self, head: str, x: Array) -> tuple[Array, list[Array]]:
        """Output, and the input of every layer."""
        trace = []
        for layer in self._layers:
            trace.append(x)
            x = self.parameters[f"{head}.{2 * layer}.weight"] @ x + self.parameters[f"{head}.{2 * layer}.bias"]
            if layer != self._layers[-1]:
                x = np.tanh(x)
        return x, trace

    def _backward(self, head: str, trace: list[Array], d_output: Array, gradient: Parameters) -> None:
        for layer in reversed(self._layers):
            gradient[f"{head}.{2 * layer}.weight"] += np.outer(d_output, trace[layer])
            gradient[f"{head}.{2 * layer}.bias"] += d_output
            d_input = self.parameters[f"{head}.{2 * layer}.weight"].T @ d_output
            d_output = d_input * (1 - trace[layer] ** 2)
