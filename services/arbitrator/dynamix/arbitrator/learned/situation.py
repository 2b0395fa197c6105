"""What a network is shown: one situation, and for `levers` the last windows. Pure.

A window is a row of numbers without a scale of their own. Those in `RELATIVE` have one: they are shown as what they
were before, less what they are now, in doublings, and the newest is not shown. The rows are in the carry, so that a
decision depends on nothing else: a replay makes the same rows from the same carry.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from dynamix.arbitrator.policies.model.exchange_memory import PRIORS, ExchangeMemory, way_of
from dynamix.arbitrator.policies.model.observation import Array32, column, decided_sizes, job_value
from dynamix.arbitrator.policies.policy import Decision
from dynamix.schemas.messages import Job
from dynamix.schemas.messages.allocation import Exchange

NUM_WINDOWS = 6
"""Windows that a network sees: the newest, and those before it."""
RELATIVE = ("loss_log2", "step_time_log2", "sync_time_log2", "noise_log2")
ABSOLUTE = (
    *("sync_share", "compute_share", "batch_to_noise_log2", "drift_log2"),
    *("period_log2", "codec_log2", "retransmits_log2", "noise_lever_log2"),
)
"""What ruled the window is among them: period, codec by its share of the bytes, the last lever on the noise scale."""
WINDOW = (*RELATIVE, *ABSOLUTE)
WINDOW_INPUTS = (
    *(f"{name}_0" for name in ABSOLUTE),
    *(f"{name}_{ago}" for ago in range(1, NUM_WINDOWS) for name in WINDOW),
)
"""By how many windows ago it was."""
STEERED_INPUTS = (
    *("held_out_accuracy", "progress", "windows_log2", "is_adam", "world_size_log2", "batch_to_base_log2"),
    *("rule_to_decided_log2", "wished_period_log2", "wished_codec_log2", "permits_lossy", "permits_local"),
)
"""What is known of the newest window, and what the rule would do."""


class Situation(NamedTuple):
    """One window as an action set shows it to a network."""

    inputs_DI: Array32
    """Decisions x the inputs that are wanted, NaN where unknown. D is the number of ranks, or 1 for the whole job."""
    base: Decision
    """What the neutral choice would do."""
    steer: Callable[[int], Decision] | None = None
    """What another choice would do, where the action set does not derive it from `base`."""


class Intent(NamedTuple):
    """What the rule itself would do."""

    decision: Decision
    exchange: Exchange


def window_row(job: Job, obs_WF: Array32, global_F: Array32, memory: ExchangeMemory, noise_lever: float) -> Array32:
    """The newest window in the order of `WINDOW`, NaN where unknown."""
    step_s, noise_scale = job_value(global_F, "step_time_s"), job_value(global_F, "noise_scale")
    sync_s, ruled = _median(obs_WF, "sync_time_s"), memory.ruling[0]
    numbers = {
        "loss_log2": _log2(job_value(global_F, "loss")),
        "step_time_log2": _log2(step_s),
        "sync_time_log2": _log2(sync_s),
        "noise_log2": _log2(noise_scale),
        "sync_share": sync_s / step_s if step_s > 0 else math.nan,
        "compute_share": _median(obs_WF, "compute_time_s") / step_s if step_s > 0 else math.nan,
        "batch_to_noise_log2": _log2(sum(decided_sizes(obs_WF)) / noise_scale) if noise_scale > 0 else math.nan,
        "drift_log2": _log2(job_value(global_F, "local_drift") / max(job.world_size - 1, 1)),
        "period_log2": _log2(ruled.every),
        "codec_log2": _codec_log2(ruled),
        "retransmits_log2": _log2(1.0 + _median(obs_WF, "retransmits")),
        "noise_lever_log2": _log2(noise_lever),
    }
    return np.array([numbers[name] for name in WINDOW], dtype=np.float32)


def window_inputs(rows_KV: Array32) -> Array32:
    """`WINDOW_INPUTS` of rows in turn, the newest first; unknown where there are fewer."""
    shown = np.full((NUM_WINDOWS, len(WINDOW)), np.nan, dtype=np.float32)
    shown[: len(rows_KV)] = rows_KV
    num = len(RELATIVE)
    shown[1:, :num] -= shown[0, :num]
    return np.concatenate([shown[0, num:], shown[1:].ravel()])


def steered_inputs(job: Job, window: int, obs_WF: Array32, global_F: Array32, intent: Intent) -> Array32:
    """`STEERED_INPUTS`."""
    decided = max(1, sum(decided_sizes(obs_WF)))
    numbers = (
        job_value(global_F, "held_out_accuracy"),
        job_value(global_F, "progress"),
        _log2(1.0 + window),
        float(job.optimizer_family == "adam"),
        _log2(job.world_size),
        _log2(decided / job.base_global_batch_size),
        _log2(max(1, intent.decision.allocation.global_batch_size) / decided),
        _log2(intent.exchange.every),
        _codec_log2(intent.exchange),
        float(job.exchange != "exact"),
        float(job.exchange == "local"),
    )
    return np.array(numbers, dtype=np.float32)


def _median(obs_WF: Array32, name: str) -> float:
    values = column(obs_WF, name)
    known = values[np.isfinite(values)]
    return float(np.median(known)) if known.size else math.nan


def _log2(value: float) -> float:
    return math.log2(value) if 0.0 < value < math.inf else math.nan


def _codec_log2(exchange: Exchange) -> float:
    """The bytes that a codec leaves, in doublings; unknown for one that the rule does not know."""
    prior = PRIORS.get(way_of(exchange))
    return math.nan if prior is None else math.log2(prior.share)
