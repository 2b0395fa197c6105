"""The job of a scenario, in the types of the real trainer."""

from collections.abc import Mapping

import torch

from dynamix.lab.workloads import Data, Part
from dynamix.trainer.job.identity import Attempt, JobIdentity
from dynamix.trainer.job.options import JobOptions

from .disturbances import LABELS, generator
from .scenario import Scenario

MARGIN_STEPS = 2
"""As a real loader without workers has it: steps from knowing of a change to the first step that can follow it."""

NOISE_DECAY = 0.9
"""As `attach` has it."""

MAX_LAG_WINDOWS = 4


def job_options(
    scenario: Scenario, seed: int, policy: str, policy_options: Mapping[str, float], sizes: tuple[int, ...]
) -> JobOptions:
    """What `attach` would have been told."""
    return JobOptions(
        local_batch_sizes=sizes,
        base_global_batch_size=scenario.base_global_batch_size,
        window_steps=scenario.window_steps,
        min_local_batch_size=scenario.min_local_batch_size,
        max_local_batch_size=scenario.max_local_batch_size,
        max_lag_windows=max(MAX_LAG_WINDOWS, scenario.lag_windows + 1),
        margin_steps=MARGIN_STEPS,
        policy=policy,
        policy_options=policy_options,
        optimizer_family="sgd" if scenario.optimizer == "sgd" else "adam",
        learning_rate_rule=scenario.learning_rate_rule,
        reduction="mean",
        seed=seed,
        shuffle=True,
        drop_last=False,
        noise_every=scenario.noise_every,
        noise_decay=NOISE_DECAY,
        supports_tracking=True,
    )


def identity_of(scenario: Scenario, job: str) -> JobIdentity:
    """What the ranks would have agreed on when they attached."""
    return JobIdentity(
        job=job,
        generation=0,
        attempt=Attempt(launch="virtual", restarts=0, max_restarts=0),
        nodes=scenario.nodes,
        max_local_batch_sizes=scenario.max_local_batch_sizes,
    )


def training_part(scenario: Scenario, data: Data, seed: int) -> Part:
    """The training part as the scenario has it: its first samples, some of their labels replaced by another class."""
    inputs, labels = (tensor[: scenario.num_train_samples or None] for tensor in data.train)
    if scenario.label_noise > 0:
        drawn = generator(seed, LABELS, 0)
        flat = labels.flatten().cpu().numpy().copy()
        wrong = drawn.random(len(flat)) < scenario.label_noise
        num_classes = int(flat.max()) + 1
        flat[wrong] = (flat[wrong] + drawn.integers(1, num_classes, size=len(flat))[wrong]) % num_classes
        labels = torch.from_numpy(flat).view(labels.shape).to(inputs.device)
    return Part(inputs, labels)
