"""PPO, in the two variants of the method (section IV-A), with the names and details of cleanrl.

`clipped`     the clipped surrogate with generalised advantages and a critic: what PPO usually means.
`simplified`  the paper's: no clipping, no advantage, the discounted return as the weight; its critic learns nothing.

Parameters are shared over workers: a batch holds every decision of every worker, T x W rows. A transition may last
several windows (a decision is in effect until the next one is), so each has its own discount: gamma to the power of its
windows. Within a transition rewards are summed. `Agent` holds network, optimizer and normalisation between updates.
"""

import importlib.metadata
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Self

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from dynamix.arbitrator.learned.policy_file import (
    MOMENTS,
    OPTIMIZER,
    OPTIMIZER_STEP,
    Normalisation,
    PolicyFile,
    PolicyMetadata,
    PPOSettings,
    UpdateStats,
)
from dynamix.arbitrator.policies.policy import Array64

from .rollout import Trajectory

HIDDEN_GAIN = 2**0.5
ACTOR_GAIN = 0.01
"""Gain of the actor's last layer: all actions are about equally likely at first."""
CRITIC_GAIN = 1.0


class ActorCritic(nn.Module):
    """Two perceptrons with tanh, initialised orthogonally (the canonical details of PPO); `forward` is it in numpy."""

    def __init__(
        self,
        num_inputs: int,
        num_actions: Sequence[int],
        hidden_sizes: Sequence[int],
        *,
        generator: torch.Generator,
        neutral_logit: float = 0.0,
    ) -> None:
        """Make the network; `num_actions` has those of each lever, whose first one is likelier by `neutral_logit`."""
        super().__init__()
        self._num_actions = list(num_actions)
        self.actor = _perceptron(num_inputs, hidden_sizes, sum(num_actions), ACTOR_GAIN, generator)
        self.critic = _perceptron(num_inputs, hidden_sizes, 1, CRITIC_GAIN, generator)
        last = self.actor[-1]
        assert isinstance(last, nn.Linear)
        with torch.no_grad():
            last.bias[[sum(num_actions[:lever]) for lever in range(len(num_actions))]] = neutral_logit

    def evaluate(self, inputs_NI: Tensor, actions_NL: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities of the actions of all levers, entropies, values: one of each per decision."""
        logprobs, entropies = torch.zeros(len(inputs_NI)), torch.zeros(len(inputs_NI))
        for lever, logits_NA in enumerate(self.actor(inputs_NI).split(self._num_actions, dim=1)):
            logprobs_NA = torch.log_softmax(logits_NA, dim=1)
            entropies = entropies - (logprobs_NA.exp() * logprobs_NA).sum(dim=1)
            logprobs = logprobs + logprobs_NA.gather(1, actions_NL[:, lever : lever + 1])[:, 0]
        return logprobs, entropies, self.critic(inputs_NI)[:, 0]

    def tensors(self) -> dict[str, npt.NDArray[np.float32]]:
        """The parameters by name, as a policy file keeps them."""
        return {name: value.detach().numpy().copy() for name, value in self.state_dict().items()}


def _perceptron(
    num_inputs: int, hidden_sizes: Sequence[int], num_outputs: int, gain: float, generator: torch.Generator
) -> nn.Sequential:
    layers: list[nn.Module] = []
    widths = [num_inputs, *hidden_sizes, num_outputs]
    for index, (fan_in, fan_out) in enumerate(pairwise(widths)):
        layer = nn.Linear(fan_in, fan_out, device="meta").to_empty(device="cpu")  # no draw from the global generator
        with torch.no_grad():
            is_last = index == len(hidden_sizes)
            nn.init.orthogonal_(layer.weight, gain if is_last else HIDDEN_GAIN, generator=generator)
            layer.bias.zero_()
        layers += [layer] if is_last else [layer, nn.Tanh()]
    return nn.Sequential(*layers)


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


class Batch(NamedTuple):
    """Decisions of one or more trajectories, float32, N rows."""

    inputs_NI: Tensor
    """Normalised."""
    actions_NL: Tensor
    """One per lever."""
    logprobs_N: Tensor
    """Log-probabilities under the policy that acted."""
    advantages_N: Tensor
    """Advantages; unused by `simplified`."""
    returns_N: Tensor
    values_N: Tensor
    """The critic's values when it acted."""


def losses(network: ActorCritic, batch: Batch, settings: PPOSettings) -> dict[str, Tensor]:
    """The loss of one minibatch, its parts, and diagnostics, by the names of `UpdateStats`."""
    logprobs_N, entropies_N, values_N = network.evaluate(batch.inputs_NI, batch.actions_NL)
    logratio_N = logprobs_N - batch.logprobs_N
    ratio_N = logratio_N.exp()
    entropy = entropies_N.mean()
    if settings.objective == "clipped":
        advantages_N = batch.advantages_N
        if settings.norm_adv and len(advantages_N) > 1:
            advantages_N = (advantages_N - advantages_N.mean()) / (advantages_N.std() + 1e-8)
        clipped_N = ratio_N.clamp(1 - settings.clip_coef, 1 + settings.clip_coef)
        policy_loss = torch.max(-advantages_N * ratio_N, -advantages_N * clipped_N).mean()
        squares_N = (values_N - batch.returns_N) ** 2
        if settings.clip_vloss:
            change_N = (values_N - batch.values_N).clamp(-settings.clip_coef, settings.clip_coef)
            squares_N = torch.max(squares_N, (batch.values_N + change_N - batch.returns_N) ** 2)
        value_loss = 0.5 * squares_N.mean()
    else:
        policy_loss = -(ratio_N * batch.returns_N).mean()
        value_loss = torch.zeros(())
    with torch.no_grad():
        approx_kl = ((ratio_N - 1) - logratio_N).mean()
        clipfrac = ((ratio_N - 1).abs() > settings.clip_coef).float().mean()
    loss = policy_loss - settings.ent_coef * entropy + settings.vf_coef * value_loss
    return {
        "loss": loss,
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": entropy,
        "approx_kl": approx_kl,
        "clipfrac": clipfrac,
    }


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
    seen: list[dict[str, Tensor]] = []
    for _ in range(settings.update_epochs):
        order = torch.randperm(len(batch.actions_NL), generator=generator)
        for rows in order.tensor_split(min(settings.num_minibatches, len(order))):
            found = losses(network, Batch(*(column[rows] for column in batch)), settings)
            optimizer.zero_grad()
            found["loss"].backward()  # type: ignore[no-untyped-call]  # torch's stub
            torch.nn.utils.clip_grad_norm_(network.parameters(), settings.max_grad_norm)
            optimizer.step()
            seen.append({name: value.detach() for name, value in found.items()})
        if settings.target_kl is not None and seen[-1]["approx_kl"].item() > settings.target_kl:
            break
    returns, values = batch.returns_N.numpy().astype(np.float64), batch.values_N.numpy().astype(np.float64)
    variance, has_critic = float(np.var(returns)), settings.objective == "clipped"
    return UpdateStats(
        learning_rate=learning_rate,
        num_steps=len(seen),
        explained_variance=1 - float(np.var(returns - values)) / variance if has_critic and variance else None,
        num_decisions=len(returns),
        **{name: float(torch.stack([each[name] for each in seen]).mean()) for name in seen[0]},
    )


class Agent:
    """Learns from trajectories. It does not decide: `learned.policy` does, with the file."""

    def __init__(
        self, metadata: PolicyMetadata, network: ActorCritic, normalisation: Normalisation, tensors: Mapping[str, Any]
    ) -> None:
        """Begin with Adam's moments of the heads that have any: the simplified objective does not train the critic."""
        self.metadata = metadata
        self.normalisation = normalisation
        self._network = network
        self._optimizer = torch.optim.Adam(network.parameters(), lr=1.0, eps=metadata.settings.adam_eps)
        for name, parameter in network.named_parameters():
            own = {moment: tensors.get(f"{OPTIMIZER}{name}.{moment}") for moment in MOMENTS}
            known = {moment: torch.from_numpy(np.array(array)) for moment, array in own.items() if array is not None}
            if known:
                step = torch.tensor(float(tensors[OPTIMIZER_STEP][0]))
                self._optimizer.state[parameter] = {"step": step, **known}

    @classmethod
    def new(cls, metadata: PolicyMetadata) -> Self:
        """An untrained agent; its initialisation is drawn from the metadata's first seed (0 without one)."""
        created_by = f"dynamix-batch {importlib.metadata.version('dynamix-batch')}"
        metadata = msgspec.structs.replace(metadata, created_by=created_by)
        network = _network(metadata, torch.Generator().manual_seed(_seed(metadata)))
        return cls(metadata, network, Normalisation.empty(len(metadata.inputs)), {})

    @classmethod
    def of(cls, file: PolicyFile) -> Self:
        """The agent that wrote a file; it continues exactly where it stopped."""
        network = _network(file.metadata, torch.Generator())
        names = list(network.state_dict())
        network.load_state_dict({name: torch.from_numpy(np.array(file.tensors[name])) for name in names})
        return cls(file.metadata, network, Normalisation.of_tensors(file.tensors), file.tensors)

    def file(self, **changes: Any) -> PolicyFile:
        """The policy as it is now, its metadata with `changes`."""
        tensors: dict[str, npt.NDArray[Any]] = {**self._network.tensors(), **self.normalisation.tensors()}
        for name, parameter in self._network.named_parameters():
            if state := self._optimizer.state.get(parameter):
                tensors |= {f"{OPTIMIZER}{name}.{moment}": state[moment].numpy().copy() for moment in MOMENTS}
                tensors[OPTIMIZER_STEP] = np.array([state["step"].item()], dtype=np.float32)
        return PolicyFile(msgspec.structs.replace(self.metadata, **changes), tensors)

    def learn(self, trajectories: Sequence[Trajectory], *, progress: float = 0.0) -> UpdateStats:
        """Update the policy from a batch of trajectories, which it decided."""
        assert trajectories, "nothing to learn from"
        number, settings = self.metadata.num_updates, self.metadata.settings
        raw = np.concatenate([t.inputs_TDI.reshape(-1, t.inputs_TDI.shape[-1]) for t in trajectories])
        if number == 0:
            self.normalisation = self.normalisation.updated(raw)
        inputs_NI = torch.from_numpy(self.normalisation.applied(raw).astype(np.float32))
        actions = [trajectory.actions_TDL.reshape(-1, len(self.metadata.actions)) for trajectory in trajectories]
        actions_NL = torch.from_numpy(np.concatenate(actions))
        columns, begin = [], 0
        for recorded in trajectories:
            trajectory, end = recorded, begin + recorded.rewards_TD.size
            if number == 0:
                # With the first normalisation, before anything was learned: otherwise the critic would be compared with
                # its own values for inputs on another scale. An untrained actor hardly depends on its inputs.
                with torch.no_grad():
                    logprobs, _, values = self._network.evaluate(inputs_NI[begin:end], actions_NL[begin:end])
                shape = recorded.rewards_TD.shape
                values_TD = values.double().numpy().reshape(shape)
                trajectory = trajectory._replace(
                    logprobs_TD=logprobs.double().numpy().reshape(shape),
                    values_TD=values_TD,
                    next_values_D=np.zeros(shape[1]) if trajectory.terminated else values_TD[-1],
                )
            begin = end
            discounts_T = settings.gamma ** trajectory.num_windows_T.astype(np.float64)
            if settings.objective == "simplified":  # the discounted sum of rewards: the paper's weight, no critic
                no_values_TD = np.zeros_like(trajectory.rewards_TD)
                returns = advantages = gae(trajectory.rewards_TD, no_values_TD, no_values_TD[0], discounts_T, 1.0)[1]
            else:
                measured = (trajectory.rewards_TD, trajectory.values_TD, trajectory.next_values_D)
                advantages, returns = gae(*measured, discounts_T, settings.gae_lambda)
            columns.append((trajectory.logprobs_TD, advantages, returns, trajectory.values_TD))
        floats = [np.concatenate([part.reshape(-1) for part in column]) for column in zip(*columns, strict=True)]
        batch = Batch(inputs_NI, actions_NL, *(torch.from_numpy(part.astype(np.float32)) for part in floats))
        generator = torch.Generator().manual_seed(_seed(self.metadata) + 1_000_003 * (number + 1))
        stats = update(self._network, self._optimizer, batch, settings, generator=generator, progress=progress)
        if number > 0:
            self.normalisation = self.normalisation.updated(raw)
        self.metadata = msgspec.structs.replace(
            self.metadata, num_updates=number + 1, num_episodes=self.metadata.num_episodes + len(trajectories)
        )
        return stats


def _network(metadata: PolicyMetadata, generator: torch.Generator) -> ActorCritic:
    return ActorCritic(
        2 * len(metadata.inputs),
        [len(each) for each in metadata.actions],
        metadata.settings.hidden_sizes,
        generator=generator,
        neutral_logit=metadata.settings.neutral_logit,
    )


def _seed(metadata: PolicyMetadata) -> int:
    return metadata.seeds[0] if metadata.seeds else 0
