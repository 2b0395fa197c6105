"""The agent: network, optimizer and normalisation, which learn from trajectories and go in and out of a policy file."""

import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from dynamix.arbitrator.learned.policy_file import MOMENTS, OPTIMIZER, OPTIMIZER_STEP, PolicyFile, PolicyMetadata
from dynamix.arbitrator.learned.ppo_settings import PPOSettings
from dynamix.arbitrator.policies.model.observation import Array64
from dynamix.schemas import networks
from dynamix.schemas.networks import Normalisation

from . import ppo
from .ppo import ActorCritic, Batch, UpdateStats
from .rollout import Trajectory


class LearningStep(NamedTuple):
    """The result of one call of `learn`."""

    stats: UpdateStats
    explained_variance: float
    """Explained variance of the critic before it learned from this batch."""
    num_decisions: int


class Agent:
    """Learns from trajectories. It does not decide: `learned.policy` does, with the file."""

    def __init__(
        self, metadata: PolicyMetadata, network: ActorCritic, normalisation: Normalisation, moments: Mapping[str, Any]
    ) -> None:
        self.metadata = metadata
        self.settings = metadata.ppo_settings
        self.normalisation = normalisation
        self._network = network
        self._optimizer = torch.optim.Adam(network.parameters(), lr=1.0, eps=self.settings.adam_eps)
        self._restore(moments)

    @classmethod
    def new(cls, metadata: PolicyMetadata, settings: PPOSettings) -> Self:
        """An untrained agent; its initialisation is drawn from the metadata's first seed (0 without one)."""
        metadata = msgspec.structs.replace(
            metadata,
            algorithm=settings.objective,
            hidden_sizes=settings.hidden_sizes,
            settings=msgspec.json.decode(msgspec.json.encode(settings)),  # as a file holds them,
            created_by=f"dynamix-batch {importlib.metadata.version('dynamix-batch')}",
        )
        generator = torch.Generator().manual_seed(_seed(metadata))
        network = _network(metadata, settings, generator)
        return cls(metadata, network, Normalisation.empty(len(metadata.inputs)), {})

    @classmethod
    def of(cls, file: PolicyFile) -> Self:
        """The agent that wrote a file; it continues exactly where it stopped."""
        network = _network(file.metadata, file.metadata.ppo_settings, torch.Generator())
        names = list(network.state_dict())
        network.load_state_dict({name: torch.from_numpy(np.array(file.tensors[name])) for name in names})
        moments = {name: array for name, array in file.tensors.items() if name.startswith(OPTIMIZER)}
        return cls(file.metadata, network, Normalisation.of_tensors(file.tensors), moments)

    def file(self, **changes: Any) -> PolicyFile:
        """The policy as it is now, its metadata with `changes`."""
        metadata = msgspec.structs.replace(self.metadata, **changes)
        return PolicyFile(metadata, self._network.tensors() | self.normalisation.tensors() | self._moments())

    def learn(self, trajectories: Sequence[Trajectory], *, progress: float = 0.0) -> LearningStep:
        """Update the policy from a batch of trajectories, which it decided."""
        assert trajectories, "nothing to learn from"
        raw = np.concatenate([t.inputs_TDI.reshape(-1, t.inputs_TDI.shape[-1]) for t in trajectories])
        if self.metadata.num_updates == 0:
            self.normalisation = self.normalisation.updated(raw)
            trajectories = [self._renormalised(trajectory) for trajectory in trajectories]
        batch, explained = self._batch(trajectories, raw)
        generator = torch.Generator().manual_seed(_seed(self.metadata) + 1_000_003 * (self.metadata.num_updates + 1))
        stats = ppo.update(self._network, self._optimizer, batch, self.settings, generator=generator, progress=progress)
        if self.metadata.num_updates > 0:
            self.normalisation = self.normalisation.updated(raw)
        self.metadata = msgspec.structs.replace(
            self.metadata,
            num_updates=self.metadata.num_updates + 1,
            num_episodes=self.metadata.num_episodes + len(trajectories),
        )
        return LearningStep(stats, explained, len(batch.actions_N))

    def _batch(self, trajectories: Sequence[Trajectory], raw: npt.NDArray[np.float32]) -> tuple[Batch, float]:
        settings, columns = self.settings, []
        for trajectory in trajectories:
            discounts_T = settings.gamma ** trajectory.num_windows_T.astype(np.float64)
            if settings.objective == "simplified":
                returns = ppo.discounted_returns(trajectory.rewards_TD, discounts_T)
                advantages = returns
            else:
                measured = (trajectory.rewards_TD, trajectory.values_TD, trajectory.next_values_D)
                advantages, returns = ppo.gae(*measured, discounts_T, settings.gae_lambda)
            columns.append((trajectory.logprobs_TD, advantages, returns, trajectory.values_TD))
        logprobs, advantages, returns, values = (
            np.concatenate([part.reshape(-1) for part in column]) for column in zip(*columns, strict=True)
        )
        actions = np.concatenate([trajectory.actions_TD.reshape(-1) for trajectory in trajectories])
        inputs = self.normalisation.applied(raw)
        floats = (torch.from_numpy(part.astype(np.float32)) for part in (logprobs, advantages, returns, values))
        batch = Batch(torch.from_numpy(inputs.astype(np.float32)), torch.from_numpy(actions), *floats)
        return batch, ppo.explained_variance(values, returns)

    def _renormalised(self, trajectory: Trajectory) -> Trajectory:
        """The trajectory with the first normalisation, before anything was learned.

        Otherwise the critic would be compared with its own values for inputs on another scale. An untrained
        actor hardly depends on its inputs, so its probabilities hardly change.
        """
        T, D, num_inputs = trajectory.inputs_TDI.shape
        inputs = self.normalisation.applied(trajectory.inputs_TDI.reshape(-1, num_inputs))
        numpy_network = networks.Forward(self._network.tensors(), len(self.metadata.hidden_sizes))
        logprobs = networks.log_softmax(numpy_network.logits(inputs))
        values: Array64 = numpy_network.values(inputs).reshape(T, D)
        return trajectory._replace(
            logprobs_TD=logprobs[np.arange(T * D), trajectory.actions_TD.reshape(-1)].reshape(T, D),
            values_TD=values,
            next_values_D=np.zeros(D) if trajectory.terminated else values[-1],
        )

    def _moments(self) -> dict[str, npt.NDArray[np.float32]]:
        """Adam's moments and step count, so that learning continues exactly where it stopped."""
        found: dict[str, npt.NDArray[np.float32]] = {}
        for name, parameter in self._network.named_parameters():
            state = self._optimizer.state.get(parameter)
            if state:
                found |= {f"{OPTIMIZER}{name}.{moment}": state[moment].numpy().copy() for moment in MOMENTS}
                found[OPTIMIZER_STEP] = np.array([state["step"].item()], dtype=np.float32)
        return found

    def _restore(self, moments: Mapping[str, npt.NDArray[Any]]) -> None:
        """Restore Adam's moments for the heads that have any: the simplified objective does not train the critic."""
        for name, parameter in self._network.named_parameters():
            own = {moment: moments.get(f"{OPTIMIZER}{name}.{moment}") for moment in MOMENTS}
            known = {moment: torch.from_numpy(np.array(array)) for moment, array in own.items() if array is not None}
            if known:
                step = torch.tensor(float(moments[OPTIMIZER_STEP][0]))
                self._optimizer.state[parameter] = {"step": step, **known}


def _network(metadata: PolicyMetadata, settings: PPOSettings, generator: torch.Generator) -> ActorCritic:
    return ActorCritic(
        2 * len(metadata.inputs),
        len(metadata.actions),
        metadata.hidden_sizes,
        generator=generator,
        neutral_logit=settings.neutral_logit,
    )


def _seed(metadata: PolicyMetadata) -> int:
    return metadata.seeds[0] if metadata.seeds else 0
