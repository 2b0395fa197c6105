"""What a network sees: the state made free of scale, by name; pure functions of one observation.

Sizes become doublings, times become shares of the step or ratios to the mean over ranks: what was learned on eight
slow workers is then worth something on a hundred fast ones. Unknown stays NaN; `normalisation` turns it into a bit.
"""

from collections.abc import Sequence

import numpy as np

from dynamix.arbitrator.policies.model.observation import Array32, Array64
from dynamix.schemas.features import GLOBAL_INDEX, RANK_INDEX
from dynamix.schemas.messages import Job

RANK_INPUTS = (
    "size_log2",
    "size_to_mean_log2",
    "room_above_log2",
    "room_below_log2",
    "running_to_decided_log2",
    "pending_to_decided_log2",
    "compute_share",
    "sync_share",
    "data_share",
    "compute_to_mean_log2",
    "rate_to_mean_log2",
    "accuracy",
    "accuracy_change",
    "loss_to_job_log2",
    "tx_to_mean_log2",
    "retransmits_log2",
    "srtt_us_log2",
    "cpu_time_ratio",
    "memory_ratio",
    "load_per_cpu",
    "age_windows",
)
"""Inputs of one rank; `_log2` is in doublings, `_share` a share of the step, `_to_mean` against the mean over ranks."""

GLOBAL_INPUTS = (
    "loss_log2",
    "loss_change_ratio",
    "accuracy",
    "accuracy_change",
    "held_out_accuracy",
    "progress",
    "batch_to_base_log2",
    "batch_to_noise_log2",
    "running_to_decided_log2",
    "step_time_s_log2",
    "throughput_log2",
    "world_size_log2",
    "windows_log2",
    "is_adam",
)
"""Inputs of the whole job."""

POOLS = ("mean", "min", "max")
"""How the inputs of all ranks become one row, whatever their number."""

LEVER_INPUTS = ("rule_to_decided_log2", "last_multiplier_log2")
"""Inputs of the global lever only: what the rule would do, and the multiplier that was last applied to it."""


def names(action_set: str) -> tuple[str, ...]:
    """All inputs of one decision of an action set, in order; a policy file lists those that it was learned with."""
    common = tuple(f"job_{name}" for name in GLOBAL_INPUTS)
    if action_set == "deltas":
        return (*RANK_INPUTS, *common)
    return (*(f"{pool}_{name}" for pool in POOLS for name in RANK_INPUTS), *common, *LEVER_INPUTS)


class Selection:
    """Selects columns by their names, in the order of the names that are wanted."""

    def __init__(self, known: Sequence[str], wanted: Sequence[str]) -> None:
        """Find each wanted name among the known ones; ValueError when one is not there."""
        self._columns = None if tuple(known) == tuple(wanted) else [known.index(name) for name in wanted]

    def __call__(self, rows: Array32) -> Array32:
        """The selected columns; the rows themselves when all are wanted in their order."""
        return rows if self._columns is None else rows.take(self._columns, axis=1)


def rank_inputs(job: Job, obs_WF: Array32) -> Array32:
    """Ranks x `RANK_INPUTS`, NaN where unknown."""
    known = {name: obs_WF[:, at].astype(np.float64) for name, at in RANK_INDEX.items()}
    decided, compute_s, step_s = known["decided_local_batch_size"], known["compute_time_s"], known["step_time_s"]
    columns = {
        "size_log2": _log2(decided),
        "size_to_mean_log2": _log2(_to_mean(decided)),
        "room_above_log2": _log2(_ratio(np.asarray(job.max_local_batch_sizes, dtype=np.float64), decided)),
        "room_below_log2": _log2(_ratio(decided, np.full_like(decided, max(1, job.min_local_batch_size)))),
        "running_to_decided_log2": _log2(_ratio(known["local_batch_size"], decided)),
        "pending_to_decided_log2": _log2(_ratio(known["pending_local_batch_size"], decided)),
        "compute_share": _ratio(compute_s, step_s),
        "sync_share": _ratio(known["sync_time_s"], step_s),
        "data_share": _ratio(known["data_time_s"], step_s),
        "compute_to_mean_log2": _log2(_to_mean(compute_s)),
        "rate_to_mean_log2": _log2(_to_mean(_ratio(known["num_samples"], compute_s))),
        "loss_to_job_log2": _log2(_to_mean(known["loss"])),
        "tx_to_mean_log2": _log2(_to_mean(known["tx_bytes_per_s"])),
        "retransmits_log2": np.log2(1 + known["retransmits"]),
        "srtt_us_log2": _log2(known["srtt_us"]),
    }
    chosen = [columns.get(name, known.get(name)) for name in RANK_INPUTS]
    assert all(column is not None for column in chosen)
    return np.stack(chosen, axis=1).astype(np.float32)  # type: ignore[arg-type]  # none is None: see above


def global_inputs(job: Job, window: int, obs_WF: Array32, global_F: Array32) -> Array32:
    """One number per `GLOBAL_INPUTS`, NaN where unknown."""
    known = {name: float(global_F[at]) for name, at in GLOBAL_INDEX.items()}
    decided = float(obs_WF[:, RANK_INDEX["decided_local_batch_size"]].astype(np.float64).sum())
    values = {
        "loss_log2": _log2_of(known["loss"]),
        "loss_change_ratio": _ratio_of(known["loss_change"], known["loss"]),
        "batch_to_base_log2": _log2_of(_ratio_of(decided, float(job.base_global_batch_size))),
        "batch_to_noise_log2": _log2_of(_ratio_of(decided, known["noise_scale"])),
        "running_to_decided_log2": _log2_of(_ratio_of(known["global_batch_size"], decided)),
        "step_time_s_log2": _log2_of(known["step_time_s"]),
        "throughput_log2": _log2_of(known["throughput"]),
        "world_size_log2": float(np.log2(job.world_size)),
        "windows_log2": float(np.log2(1 + window)),
        "is_adam": float(job.optimizer_family == "adam"),
    }
    return np.array([values.get(name, known.get(name, np.nan)) for name in GLOBAL_INPUTS], dtype=np.float32)


def pooled(inputs_WR: Array32) -> Array32:
    """One number per pool and rank input, ordered as in `names`: over the ranks where it is known, NaN without any."""
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


def _ratio_of(over: float, under: float) -> float:
    return over / under if under > 0 else np.nan


def _log2_of(value: float) -> float:
    return float(np.log2(value)) if value > 0 else np.nan
