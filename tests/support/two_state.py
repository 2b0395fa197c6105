"""A toy: two states, drawn at random each step; the right action is another one in each."""

import msgspec
import numpy as np
import torch

from dynamix.arbitrator.learned.policy_file import PPOSettings
from dynamix.arbitrator.learning.ppo import ActorCritic, Batch, discounted_returns, gae, update

NUM_ROUNDS, NUM_WORKERS = 16, 8


def solved_share(settings: PPOSettings, num_updates: int) -> float:
    """Probability of the right action, mean over both states, after learning; a reward is paid one round later."""
    settings = msgspec.structs.replace(settings, gamma=0.5, neutral_logit=0.0)
    network = ActorCritic(2, 2, settings.hidden_sizes, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.Adam(network.parameters(), lr=1.0, eps=settings.adam_eps)
    rng = np.random.default_rng(0)
    for number in range(num_updates):
        generator = torch.Generator().manual_seed(number)
        update(network, optimizer, _play(network, settings, rng), settings, generator=generator)
    with torch.no_grad():
        probabilities = torch.softmax(network.actor(torch.eye(2)), dim=1)
    return float((probabilities[0, 0] + probabilities[1, 1]) / 2)


def _play(network: ActorCritic, settings: PPOSettings, rng: np.random.Generator) -> Batch:
    states = rng.integers(2, size=(NUM_ROUNDS, NUM_WORKERS))
    inputs = torch.eye(2)[torch.from_numpy(states.reshape(-1))]
    with torch.no_grad():
        probabilities = torch.softmax(network.actor(inputs), dim=1)[:, 1].numpy()
        actions = (rng.random(len(probabilities)) < probabilities).astype(np.int64)
        logprobs, _, values = network.evaluate(inputs, torch.from_numpy(actions))
    right = (actions.reshape(states.shape) == states).astype(np.float64) - 0.5
    rewards = np.concatenate([np.zeros((1, NUM_WORKERS)), right[:-1]])
    discounts = np.full(NUM_ROUNDS, settings.gamma)
    values_TD = values.numpy().astype(np.float64).reshape(states.shape)
    advantages, returns = gae(rewards, values_TD, np.zeros(NUM_WORKERS), discounts, settings.gae_lambda)
    if settings.objective == "simplified":
        returns = discounted_returns(rewards, discounts)
    targets = (torch.from_numpy(part.reshape(-1).astype(np.float32)) for part in (advantages, returns))
    return Batch(inputs, torch.from_numpy(actions), logprobs, *targets, values)
