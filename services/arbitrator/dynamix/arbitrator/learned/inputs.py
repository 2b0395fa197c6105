"""Inputs of a network: the state made free of scale, by name; pure functions of one observation.

Sizes become doublings, times become shares of the step or ratios to the mean over ranks: what was learned on eight
slow workers is then worth something on a hundred fast ones. Unknown stays NaN; `normalisation` turns it into a bit.
"""

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter

import numpy as np

from dynamix.arbitrator.policies.model.observation import Array32, Array64
from dynamix.schemas import sight
from dynamix.schemas.features import GLOBAL_INDEX, RANK_INDEX
from dynamix.schemas.messages import Job

Columns = Mapping[str, Array64]
Input = Callable[[Columns], Array64]

RANK_INPUTS: Mapping[str, Input] = {
    "size_log2": lambda seen: _log2(seen["decided"]),
    "size_to_mean_log2": lambda seen: _log2(_to_mean(seen["decided"])),
    "room_above_log2": lambda seen: _log2(_ratio(seen["max_local_batch_size"], seen["decided"])),
    "room_below_log2": lambda seen: _log2(_ratio(seen["decided"], seen["min_local_batch_size"])),
    "running_to_decided_log2": lambda seen: _log2(_ratio(seen["local_batch_size"], seen["decided"])),
    "pending_to_decided_log2": lambda seen: _log2(_ratio(seen["pending_local_batch_size"], seen["decided"])),
    "compute_share": lambda seen: _ratio(seen["compute_time_s"], seen["step_time_s"]),
    "sync_share": lambda seen: _ratio(seen["sync_time_s"], seen["step_time_s"]),
    "data_share": lambda seen: _ratio(seen["data_time_s"], seen["step_time_s"]),
    "compute_to_mean_log2": lambda seen: _log2(_to_mean(seen["compute_time_s"])),
    "rate_to_mean_log2": lambda seen: _log2(_to_mean(_ratio(seen["num_samples"], seen["compute_time_s"]))),
    "accuracy": itemgetter("accuracy"),
    "accuracy_change": itemgetter("accuracy_change"),
    "loss_to_job_log2": lambda seen: _log2(_to_mean(seen["loss"])),
    "tx_to_mean_log2": lambda seen: _log2(_to_mean(seen["tx_bytes_per_s"])),
    "retransmits_log2": lambda seen: np.log2(1 + seen["retransmits"]),
    "srtt_us_log2": lambda seen: _log2(seen["srtt_us"]),
    "cpu_time_ratio": itemgetter("cpu_time_ratio"),
    "memory_ratio": itemgetter("memory_ratio"),
    "load_per_cpu": itemgetter("load_per_cpu"),
    "age_windows": itemgetter("age_windows"),
}
"""Inputs of one rank; `_log2` is in doublings, `_share` a share of the step, `_to_mean` against the mean over ranks."""

GLOBAL_INPUTS: Mapping[str, Input] = {
    "loss_log2": lambda seen: _log2(seen["loss"]),
    "loss_change_ratio": lambda seen: _ratio(seen["loss_change"], seen["loss"]),
    "accuracy": itemgetter("accuracy"),
    "accuracy_change": itemgetter("accuracy_change"),
    "held_out_accuracy": itemgetter("held_out_accuracy"),
    "progress": itemgetter("progress"),
    "batch_to_base_log2": lambda seen: _log2(_ratio(seen["decided"], seen["base_global_batch_size"])),
    "batch_to_noise_log2": lambda seen: _log2(_ratio(seen["decided"], seen["noise_scale"])),
    "running_to_decided_log2": lambda seen: _log2(_ratio(seen["global_batch_size"], seen["decided"])),
    "step_time_s_log2": lambda seen: _log2(seen["step_time_s"]),
    "throughput_log2": lambda seen: _log2(seen["throughput"]),
    "world_size_log2": lambda seen: _log2(seen["world_size"]),
    "windows_log2": lambda seen: _log2(seen["num_windows"]),
    "is_adam": itemgetter("is_adam"),
}
"""Inputs of the whole job; each column has one row."""

POOLS = ("mean", "min", "max")
"""Functions that pool the inputs of any number of ranks into one row."""

LEVER_INPUTS = ("rule_to_decided_log2", "last_multiplier_log2")
"""Inputs of the global lever only: what the rule would do, and the multiplier that was last applied to it."""


def names(action_set: str) -> tuple[str, ...]:
    """All inputs of one decision of an action set, in order; a policy file lists those that it was learned with."""
    if action_set == "appetite":
        return sight.INPUTS
    common = tuple(f"job_{name}" for name in GLOBAL_INPUTS)
    if action_set == "deltas":
        return (*RANK_INPUTS, *common)
    return (*(f"{pool}_{name}" for pool in POOLS for name in RANK_INPUTS), *common, *LEVER_INPUTS)


def columns(action_set: str, wanted: Sequence[str]) -> list[int]:
    """The places of the wanted inputs among `names`, in the order of `wanted`; ValueError when one is not there."""
    known = names(action_set)
    return [known.index(name) for name in wanted]


def rank_inputs(job: Job, obs_WF: Array32) -> Array32:
    """Ranks x `RANK_INPUTS`, NaN where unknown."""
    seen = {name: obs_WF[:, at].astype(np.float64) for name, at in RANK_INDEX.items()}
    seen["decided"] = seen["decided_local_batch_size"]
    seen["max_local_batch_size"] = np.asarray(job.max_local_batch_sizes, dtype=np.float64)
    seen["min_local_batch_size"] = np.full(job.world_size, float(max(1, job.min_local_batch_size)))
    return np.stack([make(seen) for make in RANK_INPUTS.values()], axis=1).astype(np.float32)


def global_inputs(job: Job, window: int, obs_WF: Array32, global_F: Array32) -> Array32:
    """The values of `GLOBAL_INPUTS`, NaN where unknown."""
    numbers = {
        "decided": obs_WF[:, RANK_INDEX["decided_local_batch_size"]].astype(np.float64).sum(),
        "base_global_batch_size": job.base_global_batch_size,
        "world_size": job.world_size,
        "num_windows": 1 + window,
        "is_adam": job.optimizer_family == "adam",
        **{name: global_F[at] for name, at in GLOBAL_INDEX.items()},
    }
    seen = {name: np.array([number], dtype=np.float64) for name, number in numbers.items()}
    return np.concatenate([make(seen) for make in GLOBAL_INPUTS.values()]).astype(np.float32)


def pooled(job: Job, obs_WF: Array32) -> Array32:
    """One number per pool and rank input, ordered as in `names`: over the ranks where it is known, NaN without any."""
    inputs_WR = rank_inputs(job, obs_WF)
    known = ~np.isnan(inputs_WR)
    count = known.sum(axis=0)
    pools = (
        np.where(known, inputs_WR, 0).sum(axis=0, dtype=np.float64) / np.maximum(count, 1),
        np.where(known, inputs_WR, np.inf).min(axis=0),
        np.where(known, inputs_WR, -np.inf).max(axis=0),
    )
    return np.concatenate([np.where(count > 0, pool, np.nan) for pool in pools]).astype(np.float32)


def _ratio(over: Array64, under: Array64) -> Array64:
    """NaN where the divisor is not positive or either is unknown."""
    result = np.full(len(over), np.nan)
    np.divide(over, under, out=result, where=under > 0)
    return result


def _to_mean(values: Array64) -> Array64:
    known = ~np.isnan(values)
    mean = values[known].mean() if known.any() else np.nan
    return _ratio(values, np.full_like(values, mean))


def _log2(values: Array64) -> Array64:
    """NaN where the value is not positive or unknown."""
    result = np.full(len(values), np.nan)
    np.log2(values, out=result, where=values > 0)
    return result
