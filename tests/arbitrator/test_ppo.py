"""PPO: advantages, losses and one whole update equal independent references."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynamix.arbitrator.learned.policy_file import PPOSettings
from dynamix.arbitrator.learning.ppo import ActorCritic, Batch, gae, update

NUM_INPUTS, NUM_ACTIONS, NUM_ROWS = 6, (3, 2), 48
SMALL = PPOSettings(hidden_sizes=(8, 7), num_minibatches=3, update_epochs=2, target_kl=None, learning_rate=0.01)
VARIANTS = {
    "clipped": SMALL,
    "clipped, value loss too": msgspec.structs.replace(SMALL, clip_vloss=True),
    "clipped, advantages as they are": msgspec.structs.replace(SMALL, norm_adv=False),
    "simplified": msgspec.structs.replace(SMALL, objective="simplified"),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def network(seed: int = 0, hidden_sizes: tuple[int, ...] = (8, 7)) -> ActorCritic:
    made = ActorCritic(NUM_INPUTS, NUM_ACTIONS, hidden_sizes, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for parameter in made.actor.parameters():
            parameter.mul_(3)  # far from uniform, so that every branch of the loss is met
    return made


def batch(seed: int = 1) -> Batch:
    """Ratios from about a half to two: inside and outside of the clip, with advantages of both signs."""
    rng = np.random.default_rng(seed)
    columns = (
        rng.normal(size=(NUM_ROWS, NUM_INPUTS)),
        np.log(rng.uniform(0.1, 0.4, NUM_ROWS)),
        rng.normal(size=NUM_ROWS),
        rng.normal(size=NUM_ROWS),
        rng.normal(size=NUM_ROWS),
    )
    inputs, logprobs, advantages, returns, values = (torch.tensor(c, dtype=torch.float32) for c in columns)
    actions = torch.tensor(rng.integers(NUM_ACTIONS, size=(NUM_ROWS, len(NUM_ACTIONS))))
    return Batch(inputs, actions, logprobs, advantages, returns, values)


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


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_whole_update_equals_the_reference(variant: str) -> None:
    settings, made, rows = VARIANTS[variant], network(), batch()
    plain = PlainPPO(made.tensors(), NUM_ACTIONS, settings)
    optimizer = torch.optim.Adam(made.parameters(), lr=1.0, eps=settings.adam_eps)
    stats = update(made, optimizer, rows, settings, generator=torch.Generator().manual_seed(5), progress=0.25)
    shuffle = torch.Generator().manual_seed(5)
    for _ in range(settings.update_epochs):
        for part in torch.randperm(NUM_ROWS, generator=shuffle).tensor_split(settings.num_minibatches):
            plain.step([column[part].numpy() for column in rows], settings.learning_rate * 0.75)
    assert stats.num_steps == 6
    for name, array in made.tensors().items():
        assert np.abs(array - plain.parameters[name]).max() < 1e-6, name  # `simplified` leaves the critic alone


def test_the_hidden_layers_begin_orthogonal_and_the_neutral_action_of_each_lever_ahead() -> None:
    made = ActorCritic(6, (3, 2), (4,), generator=torch.Generator().manual_seed(0), neutral_logit=1.5)
    weight = made.tensors()["actor.0.weight"].astype(np.float64)
    assert weight @ weight.T == pytest.approx(2 * np.eye(4), abs=1e-5)
    assert made.tensors()["actor.2.bias"].tolist() == [1.5, 0, 0, 1.5, 0]


def test_target_kl_ends_an_update_early() -> None:
    made, settings = network(), msgspec.structs.replace(SMALL, target_kl=1e-6, update_epochs=50)
    optimizer = torch.optim.Adam(made.parameters(), lr=1.0, eps=1e-5)
    stats = update(made, optimizer, batch(), settings, generator=torch.Generator().manual_seed(0))
    assert stats.num_steps == settings.num_minibatches


def definition(
    rewards: list[float], values: list[float], next_value: float, discounts: list[float], gae_lambda: float
) -> list[float]:
    """A_t = sum_l (prod_{j<l} lambda g_{t+j}) delta_{t+l}: the sum itself, not the recursion."""
    following = [*values[1:], next_value]
    deltas = [r + g * v1 - v0 for r, g, v0, v1 in zip(rewards, discounts, values, following, strict=True)]
    advantages = []
    for t in range(len(rewards)):
        total, weight = 0.0, 1.0
        for later in range(t, len(rewards)):
            total += weight * deltas[later]
            weight *= discounts[later] * gae_lambda
        advantages.append(total)
    return advantages


numbers = st.floats(-10, 10)


@given(st.lists(st.tuples(numbers, numbers, st.integers(1, 4)), min_size=1, max_size=20), numbers, st.floats(0, 1))
def test_advantages_and_returns_equal_their_definition(
    rows: list[tuple[float, float, int]], next_value: float, gae_lambda: float
) -> None:
    rewards, values, windows = (list(column) for column in zip(*rows, strict=True))
    discounts = [0.9**n for n in windows]
    expected = definition(rewards, values, next_value, discounts, gae_lambda)
    advantages, returns = gae(
        np.array(rewards)[:, None],
        np.array(values)[:, None],
        np.array([next_value]),
        np.array(discounts),
        gae_lambda,
    )
    assert advantages[:, 0] == pytest.approx(expected, abs=1e-9)
    assert returns[:, 0] == pytest.approx(np.add(expected, values), abs=1e-9)
