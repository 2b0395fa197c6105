"""The state: a versioned list of named features, and pure functions from a metric window to packed float32 and back.

Values are in the units that their names carry; a policy normalises what it wants normalised. What is not known is NaN,
never a silent zero.
"""

import math
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .codec import MalformedMessageError
from .messages import MetricWindow, NetworkMetrics, State, SystemMetrics, TrainingMetrics

FEATURE_VERSION = 8
"""Raised whenever the lists change. A name keeps its meaning: policies learned before find theirs by name."""

Array32 = npt.NDArray[np.float32]
Values = tuple[float | None, ...]


class Feature(NamedTuple):
    """A named number of the state; its place in the list is its column."""

    name: str
    group: str
    meaning: str


RANK_FEATURES = (
    Feature("tx_bytes_per_s", "network", "acknowledged bytes sent, per second of training"),
    Feature("rx_bytes_per_s", "network", "bytes received, per second of training"),
    Feature("retransmits", "network", "retransmitted segments in the window"),
    Feature("srtt_us", "network", "smoothed round trip time"),
    Feature("cpu_time_ratio", "system", "CPU seconds per second"),
    Feature("memory_ratio", "system", "share of the device's memory in use"),
    Feature("run_queue_wait_ratio", "system", "seconds its threads waited for a processor, per second"),
    Feature("context_switches_per_s", "system", "of all its threads"),
    Feature("load_per_cpu", "system", "the node's load average per processor"),
    Feature("node_cpu_time_ratio", "system", "busy share of the node's processors"),
    Feature("node_run_queue_wait_ratio", "system", "seconds waited on the node, per second and processor"),
    Feature("node_memory_used_ratio", "system", "share of the node's memory in use"),
    Feature("node_context_switches_per_s", "system", "of all the node's threads"),
    Feature("accuracy", "training", "mean batch accuracy of the rank"),
    Feature("accuracy_change", "training", "its change since the last window"),
    Feature("loss", "training", "mean loss of the rank"),
    Feature("step_time_s", "training", "mean time of a step"),
    Feature("compute_time_s", "training", "of it: batch handed out to last gradient bucket ready"),
    Feature("sync_time_s", "training", "of it: waiting for slower ranks, and all-reduce"),
    Feature("data_time_s", "training", "of it: waiting for data"),
    Feature("update_time_s", "training", "of it: the optimizer and the user's own code"),
    Feature("sigma_norm", "training", "normalised standard deviation of the gradient"),
    Feature("sigma_norm_sq", "training", "normalised variance of the gradient: S / (B G^2)"),
    Feature("num_samples", "training", "samples of the rank in the window"),
    Feature("local_batch_size", "training", "the size in effect in the window"),
    Feature("pending_local_batch_size", "training", "the newest size already scheduled"),
    Feature("decided_local_batch_size", "decision", "the arbitrator's own last decision, filled in by its fold"),
    Feature("age_windows", "decision", "how many windows old the row is, filled in by the fold"),
    Feature("link_bytes_per_s", "network", "per second of sending, to the rank with which it was fastest"),
    Feature("link_peer", "network", "that rank"),
)
"""Features of one rank (method section IV-B, plus pending sizes and the age of information); new ones go to the end."""

GLOBAL_FEATURES = (
    Feature("loss", "global", "mean loss over samples"),
    Feature("loss_change", "global", "its change since the last window"),
    Feature("accuracy", "global", "mean training accuracy over samples"),
    Feature("accuracy_change", "global", "its change since the last window"),
    Feature("held_out_accuracy", "global", "the newest evaluation"),
    Feature("progress", "global", "share of the planned samples seen"),
    Feature("global_batch_size", "global", "sum of the local batch sizes"),
    Feature("step_time_s", "global", "mean time of a step, slowest rank"),
    Feature("throughput", "global", "samples per second of training"),
    Feature("noise_scale", "global", "B_noise in samples"),
    Feature("local_drift", "global", "local steps: squared distance of ranks from their mean, over that of its move"),
    Feature("learning_rate", "global", "of the first optimizer's first parameters, as steps use it"),
    Feature("gradient_norm", "global", "of a step's gradient, by the noise estimate: sqrt(|G|^2 + S / B)"),
    Feature("coding_gain", "global", "codecs with loss: squared norm of what was sent, over what should have been"),
    Feature("stretch", "global", "how many times the job's `window_steps` the window lasted"),
)
"""Features of the whole job, equal on all ranks; new ones go to the end."""

RANK_INDEX = {feature.name: index for index, feature in enumerate(RANK_FEATURES)}
GLOBAL_INDEX = {feature.name: index for index, feature in enumerate(GLOBAL_FEATURES)}

_RANK_PATHS = {
    name: f"{part}.{name}"
    for part, struct in (("training", TrainingMetrics), ("system", SystemMetrics))
    for name in struct.__struct_fields__
    if name in RANK_INDEX
}
_NODE_PATHS = {
    "load_per_cpu": "load_per_cpu",
    "node_cpu_time_ratio": "cpu_time_ratio",
    "node_run_queue_wait_ratio": "run_queue_wait_ratio",
    "node_memory_used_ratio": "memory_used_ratio",
    "node_context_switches_per_s": "context_switches_per_s",
}
_TRAFFIC = ("tx_bytes_per_s", "rx_bytes_per_s", "retransmits", "srtt_us")
_KNOWN = (*_RANK_PATHS, *_TRAFFIC, *_NODE_PATHS, "sigma_norm", "sigma_norm_sq")
"""Values of a rank in a metric window, in the order in which they are read; the fold fills in the others."""

_OF_RANK, _OF_NODE = attrgetter(*_RANK_PATHS.values()), attrgetter(*_NODE_PATHS.values())
_OF_JOB = attrgetter(*(name if name == "stretch" else f"job_metrics.{name}" for name in GLOBAL_INDEX))
_COLUMNS = [_KNOWN.index(feature.name) if feature.name in _KNOWN else len(_KNOWN) for feature in RANK_FEATURES]


def state_of(window: MetricWindow) -> State:
    """The state vectors of a metric window: computed in float64, rounded once to float32, packed little-endian."""
    return State(
        job=window.job,
        generation=window.generation,
        window=window.window,
        node=window.node,
        feature_version=FEATURE_VERSION,
        ranks=tuple(rank.rank for rank in window.ranks),
        features=_pack(np.array(_rank_values(window), dtype=np.float64)[:, _COLUMNS]),
        global_features=_pack(np.array(_OF_JOB(window), dtype=np.float64)),
    )


def check_state(state: State) -> None:
    """Check that a state can be unpacked, at a tenth of the cost of unpacking it.

    Raises:
        MalformedMessageError: when the version is another, the bytes do not fit the number of ranks, or a feature is
            infinite.
    """
    if state.feature_version != FEATURE_VERSION:
        raise MalformedMessageError(f"features of version {state.feature_version}, this program has {FEATURE_VERSION}")
    for features, num_rows, num_columns in (
        (state.features, len(state.ranks), len(RANK_FEATURES)),
        (state.global_features, 1, len(GLOBAL_FEATURES)),
    ):
        if len(features) != 4 * num_rows * num_columns:
            raise MalformedMessageError(f"{len(features)} feature bytes do not fit {(num_rows, num_columns)}")
        if np.isinf(np.frombuffer(features, dtype="<f4")).any():
            raise MalformedMessageError("a feature is infinite")


def unpack_ranks(state: State) -> Array32:
    """Features of a state's ranks: float32, ranks x features, in the order of `state.ranks`; NaN where unknown.

    Raises as `check_state`.
    """
    check_state(state)
    return stack_ranks([state])


def stack_ranks(states: Sequence[State]) -> Array32:
    """Unpack the ranks of several checked states, one below the other, in one pass."""
    values = np.frombuffer(b"".join(state.features for state in states), dtype="<f4")
    return values.astype(np.float32).reshape(-1, len(RANK_FEATURES))


def unpack_global(state: State) -> Array32:
    """Features of the job: float32, one per `GLOBAL_FEATURES`; NaN where unknown. Raises as `check_state`."""
    check_state(state)
    return np.frombuffer(state.global_features, dtype="<f4").astype(np.float32)


def _rank_values(window: MetricWindow) -> list[Values]:
    """Every value known of each rank, in the order of `_KNOWN`."""
    node, sigma_norm_sq = window.node_metrics, window.job_metrics.sigma_norm_sq
    sigma_norm = None if sigma_norm_sq is None or sigma_norm_sq < 0 else math.sqrt(sigma_norm_sq)
    shared = (*_OF_NODE(node), sigma_norm, sigma_norm_sq, None)
    if window.probe in ("ebpf", "proc"):  # counted over the collector's own interval, not over the window
        interval_s = node.interval_s or 0.0
        return [(*_OF_RANK(rank), *_traffic(rank.network, interval_s), *shared) for rank in window.ranks]
    return [
        (*_OF_RANK(rank), *_traffic(rank.network, rank.training.step_time_s * window.num_steps), *shared)
        for rank in window.ranks
    ]


def _traffic(network: NetworkMetrics | None, time_s: float) -> Values:
    """Rates, retransmitted segments and round trip time of one rank; rates only over some time."""
    if network is None:
        return None, None, None, None
    if time_s <= 0:
        return None, None, network.retransmits, network.srtt_us
    return network.tx_bytes / time_s, network.rx_bytes / time_s, network.retransmits, network.srtt_us


def _pack(values: npt.NDArray[np.float64]) -> bytes:
    """The values as float32; what float32 cannot hold is as little known as what was not measured."""
    with np.errstate(over="ignore"):
        rounded = values.astype("<f4")
    rounded[~np.isfinite(rounded)] = np.nan
    return rounded.tobytes()
