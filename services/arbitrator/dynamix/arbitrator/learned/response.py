"""Inputs on which a learned policy depends: one that ignores its state is a constant, however it was learned. Pure."""

from collections.abc import Mapping

import numpy as np

from dynamix.arbitrator.policies.policy import Array32

from .policy_file import Network, Normalisation, PolicyFile

LEAST_DEPENDENCE = 0.01
"""Share of decisions that another state must change: below it a policy is dead."""
NUM_STATES = 2000


def group_of(name: str) -> str:
    """The group of inputs that an input belongs to, which are put out of order together."""
    if name.endswith("_before"):
        return "past"
    groups = {
        "size": ("size_log2", "batch_to_base_log2", "room_above_log2", "room_below_log2", "decided_to_batch_log2"),
        "noise": ("sigma_norm", "sigma_norm_sq", "batch_to_noise_log2"),
        "exchange": ("every_log2", "is_int8", "decided_every_log2", "decided_is_int8"),
        "network": ("tx_bytes_per_s_log2", "retransmits_log2"),
        "system": ("cpu_time_ratio", "memory_ratio"),
        "accuracy": ("accuracy", "accuracy_change"),
        "times": ("step_time_s_log2", "step_elasticity", "step_change"),
    }
    found = next((group for group, names in groups.items() if name in names), None)
    return found or ("times" if name.endswith("_share") else "job")


def typical_states(file: PolicyFile) -> Array32:
    """States drawn from the moments of what the policy has seen, each input for itself: states x inputs."""
    moments = Normalisation.of_tensors(file.tensors)
    drawn = np.random.default_rng(0).standard_normal((NUM_STATES, len(file.metadata.inputs)))
    return (moments.mean_I + moments.deviation_I * drawn).astype(np.float32)


def dependence(file: PolicyFile, states_DI: Array32) -> dict[str, float]:
    """Share of decisions that change when a group of inputs comes from another state; `all`: all inputs do.

    The greatest groups first.
    """
    other = np.random.default_rng(0).permutation(len(states_DI))
    network, groups, found = Network(file), [group_of(name) for name in file.metadata.inputs], {}
    chosen, *_ = network.choose(states_DI)
    for group in sorted(set(groups)):
        mixed = np.where([each == group for each in groups], states_DI[other], states_DI)
        found[group] = float((network.choose(mixed)[0] != chosen).any(axis=1).mean())
    every = {"all": float((chosen[other] != chosen).any(axis=1).mean())}
    return every | dict(sorted(found.items(), key=lambda pair: -pair[1]))


def is_dead(found: Mapping[str, float]) -> bool:
    """Whether a policy's choices hardly depend on its state."""
    return found["all"] < LEAST_DEPENDENCE
