"""PPO, in the two variants of the method (section IV-A), with the names and details of cleanrl.

`clipped`     the clipped surrogate with generalised advantages and a critic: what PPO usually means.
`simplified`  the paper's: no clipping, no advantage, the discounted return as the weight; its critic learns nothing.

Parameters are shared over workers: a batch holds every decision of every worker, T x W rows. A transition may last
several windows (a decision rules until the next one does), so each has its own discount: gamma to the power of its
windows. Within a transition rewards are summed.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from dynamix.arbitrator.learned.ppo_settings import PPOSettings
from dynamix.arbitrator.policies.model.observation import Array64

HIDDEN_GAIN = 2**0.5
ACTOR_GAIN = 0.01
"""Gain of the actor's last layer: all actions are about equally likely at first."""
CRITIC_GAIN = 1.0


class ActorCritic(nn.Module):
    """Two perceptrons with tanh, initialised orthogonally (the canonical details of PPO); `forward` is it in numpy."""

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


def gae(
    rewards_TD: Array64, values_TD: Array64, next_values_D: Array64, discounts_T: Array64, gae_lambda: float
) -> tuple[Array64, Array64]:
    """Advantages, and returns (advantages plus values: what the critic learns), T x D each.

    Generalised advantage estimation (Schulman et al., 2015, equation 16) with gamma ** windows as the discount of each
    transition; lambda 0 trusts the critic alone, 1 the rewards alone. `next_values_D` are the critic's at the end of a
    trajectory that was cut off, zeros when it terminated, since nothing comes after.
    """
    advantages = np.zeros_like(rewards_TD)
    following, advantage = next_values_D, np.zeros_like(next_values_D)
    for t in reversed(range(len(rewards_TD))):
        delta = rewards_TD[t] + discounts_T[t] * following - values_TD[t]
        advantage = delta + discounts_T[t] * gae_lambda * advantage
        advantages[t], following = advantage, values_TD[t]
    return advantages, advantages + values_TD


def discounted_returns(rewards_TD: Array64, discounts_T: Array64) -> Array64:
    """The discounted sum of rewards from each transition on: the weight of the paper's objective, without a critic."""
    no_values = np.zeros_like(rewards_TD)
    return gae(rewards_TD, no_values, np.zeros(rewards_TD.shape[1]), discounts_T, gae_lambda=1.0)[1]


def explained_variance(values: Array64, returns: Array64) -> float:
    """1 - Var(returns - values) / Var(returns): 1 is a perfect critic, 0 an uninformative one; NaN without variance."""
    variance = float(np.var(returns))
    return float("nan") if variance == 0 else 1 - float(np.var(returns - values)) / variance


class Batch(NamedTuple):
    """Decisions of one or more trajectories, float32, N rows."""

    inputs_NI: Tensor
    """Normalised."""
    actions_N: Tensor
    logprobs_N: Tensor
    """Log-probabilities under the policy that acted."""
    advantages_N: Tensor
    """Advantages; unused by `simplified`."""
    returns_N: Tensor
    values_N: Tensor
    """The critic's values when it acted."""


class Losses(NamedTuple):
    """Losses of one minibatch, and diagnostics of the learning."""

    loss: Tensor
    policy_loss: Tensor
    value_loss: Tensor
    entropy: Tensor
    approx_kl: Tensor
    """E[(ratio - 1) - log ratio], Schulman's low-variance estimate."""
    clipfrac: Tensor
    """Share of decisions whose ratio left 1 +- clip_coef."""


class UpdateStats(NamedTuple):
    """An update in numbers: means over its minibatches."""

    loss: float
    policy_loss: float
    value_loss: float
    entropy: float
    approx_kl: float
    clipfrac: float
    learning_rate: float
    num_steps: int
    """Optimizer steps taken; fewer than planned when `target_kl` ended the update."""


def update(
    network: ActorCritic,
    optimizer: torch.optim.Adam,
    batch: Batch,
    settings: PPOSettings,
    *,
    generator: torch.Generator,
    progress: float = 0.0,
) -> UpdateStats:
    """Learn from one batch: change the network in place; equal arguments give bit-equal parameters on one thread.

    The optimizer's learning rate is set here, from `progress`, the share of the planned learning already done, where
    the settings say `anneal_lr`; the generator draws the minibatches.
    """
    learning_rate = settings.learning_rate * (1 - min(progress, 1.0) if settings.anneal_lr else 1)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    seen: list[Losses] = []
    for _ in range(settings.update_epochs):
        order = torch.randperm(len(batch.actions_N), generator=generator)
        for rows in order.tensor_split(min(settings.num_minibatches, len(order))):
            part = Batch(*(column[rows] for column in batch))
            seen.append(_step(network, optimizer, part, settings))
        if settings.target_kl is not None and seen[-1].approx_kl.item() > settings.target_kl:
            break
    mean = Losses(*(torch.stack(column).mean() for column in zip(*seen, strict=True)))
    numbers = {name: float(value) for name, value in mean._asdict().items()}
    return UpdateStats(learning_rate=learning_rate, num_steps=len(seen), **numbers)


def losses(network: ActorCritic, batch: Batch, settings: PPOSettings) -> Losses:
    """The losses of one minibatch."""
    logprobs_N, entropies_N, values_N = network.evaluate(batch.inputs_NI, batch.actions_N)
    logratio_N = logprobs_N - batch.logprobs_N
    ratio_N = logratio_N.exp()
    entropy = entropies_N.mean()
    if settings.objective == "clipped":
        policy_loss = _clipped(ratio_N, batch.advantages_N, settings)
        value_loss = _value_loss(values_N, batch, settings)
    else:
        policy_loss = -(ratio_N * batch.returns_N).mean()
        value_loss = torch.zeros(())
    with torch.no_grad():
        approx_kl = ((ratio_N - 1) - logratio_N).mean()
        clipfrac = ((ratio_N - 1).abs() > settings.clip_coef).float().mean()
    loss = policy_loss - settings.ent_coef * entropy + settings.vf_coef * value_loss
    return Losses(loss, policy_loss.detach(), value_loss.detach(), entropy.detach(), approx_kl, clipfrac)


def _clipped(ratio_N: Tensor, advantages_N: Tensor, settings: PPOSettings) -> Tensor:
    """PPO's pessimistic surrogate, negated."""
    if settings.norm_adv and len(advantages_N) > 1:
        advantages_N = (advantages_N - advantages_N.mean()) / (advantages_N.std() + 1e-8)
    clipped_N = ratio_N.clamp(1 - settings.clip_coef, 1 + settings.clip_coef)
    return torch.max(-advantages_N * ratio_N, -advantages_N * clipped_N).mean()


def _value_loss(values_N: Tensor, batch: Batch, settings: PPOSettings) -> Tensor:
    squares_N = (values_N - batch.returns_N) ** 2
    if settings.clip_vloss:
        change_N = (values_N - batch.values_N).clamp(-settings.clip_coef, settings.clip_coef)
        squares_N = torch.max(squares_N, (batch.values_N + change_N - batch.returns_N) ** 2)
    return 0.5 * squares_N.mean()


def _step(network: ActorCritic, optimizer: torch.optim.Adam, batch: Batch, settings: PPOSettings) -> Losses:
    found = losses(network, batch, settings)
    optimizer.zero_grad()
    found.loss.backward()  # type: ignore[no-untyped-call]  # torch's stub
    torch.nn.utils.clip_grad_norm_(network.parameters(), settings.max_grad_norm)
    optimizer.step()
    return found._replace(loss=found.loss.detach())
