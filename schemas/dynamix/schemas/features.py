"""The state: a versioned list of named features, and pure functions from a metric window to packed float32 and back.

Values are in the units that their names carry; a policy normalises what it wants normalised. What is not known is NaN,
never a silent zero.
"""

import math
from collections.abc import Sequence
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from .codec import MalformedMessageError
from .messages import MetricWindow, State, SystemMetrics, TrainingMetrics

FEATURE_VERSION = 9
"""Raised whenever the lists change. A name keeps its meaning: policies learned before find theirs by name."""

Array32 = npt.NDArray[np.float32]
Values = tuple[float | None, ...]


RANK_FEATURES = {
    "tx_bytes_per_s": "acknowledged bytes sent, per second of training",
    "rx_bytes_per_s": "bytes received, per second of training",
    "retransmits": "retransmitted segments in the window",
    "srtt_us": "smoothed round trip time",
    "cpu_time_ratio": "CPU seconds per second",
    "memory_ratio": "share of the device's memory in use",
    "run_queue_wait_ratio": "seconds its threads waited for a processor, per second",
    "context_switches_per_s": "of all its threads",
    "load_per_cpu": "the node's load average per processor",
    "node_cpu_time_ratio": "busy share of the node's processors",
    "node_run_queue_wait_ratio": "seconds waited on the node, per second and processor",
    "node_memory_used_ratio": "share of the node's memory in use",
    "node_context_switches_per_s": "of all the node's threads",
    "accuracy": "mean batch accuracy of the rank",
    "accuracy_change": "its change since the last window",
    "loss": "mean loss of the rank",
    "step_time_s": "mean time of a step",
    "compute_time_s": "of it: batch handed out to last gradient bucket ready",
    "sync_time_s": "of it: waiting for slower ranks, and all-reduce",
    "data_time_s": "of it: waiting for data",
    "update_time_s": "of it: the optimizer and the user's own code",
    "sigma_norm": "normalised standard deviation of the gradient",
    "sigma_norm_sq": "normalised variance of the gradient: S / (B G^2)",
    "num_samples": "samples of the rank in the window",
    "local_batch_size": "the size in effect in the window",
    "pending_local_batch_size": "the newest size already scheduled",
    "decided_local_batch_size": "the arbitrator's own last decision, filled in by its fold",
    "age_windows": "how many windows old the row is, filled in by the fold",
    "link_bytes_per_s": "per second of sending, to the rank with which it was fastest",
    "link_peer": "that rank",
    "waiting_time_s": "of `sync_time_s`, for slower ranks",
}
"""Features of one rank with their meanings (method section IV-B, plus pending sizes and the age of information), in the
order of columns; new ones go to the end."""

GLOBAL_FEATURES = {
    "loss": "mean loss over samples",
    "loss_change": "its change since the last window",
    "accuracy": "mean training accuracy over samples",
    "accuracy_change": "its change since the last window",
    "held_out_accuracy": "the newest evaluation",
    "progress": "share of the planned samples seen",
    "global_batch_size": "sum of the local batch sizes",
    "step_time_s": "mean time of a step, slowest rank",
    "throughput": "samples per second of training",
    "noise_scale": "B_noise in samples",
    "learning_rate": "of the first optimizer's first parameters, as steps use it",
    "gradient_norm": "of a step's gradient, by the noise estimate: sqrt(|G|^2 + S / B)",
    "coding_gain": "codecs with loss: squared norm of what was sent, over what should have been",
    "stretch": "how many times the job's `window_steps` the window lasted",
}
"""Features of the whole job, equal on all ranks; new ones go to the end."""

RANK_INDEX = {name: index for index, name in enumerate(RANK_FEATURES)}
GLOBAL_INDEX = {name: index for index, name in enumerate(GLOBAL_FEATURES)}

_RANK_PATHS = {
    name: f"{part}.{name}"
    for part, struct in (("training", TrainingMetrics), ("system", SystemMetrics))
    for name in struct.__struct_fields__
    if name in RANK_INDEX
}
_OF_NODES = ("load_per_cpu", *(name for name in RANK_INDEX if name.startswith("node_")))
_TRAFFIC = ("tx_bytes_per_s", "rx_bytes_per_s", "retransmits", "srtt_us")
_NO_TRAFFIC: Values = (None,) * len(_TRAFFIC)
_KNOWN = (*_RANK_PATHS, *_TRAFFIC, *_OF_NODES, "sigma_norm", "sigma_norm_sq")
"""Values of a rank in a metric window, in the order in which they are read; the fold fills in the others."""

_OF_RANK = attrgetter(*_RANK_PATHS.values())
_OF_NODE = attrgetter(*(name.removeprefix("node_") for name in _OF_NODES))
_OF_JOB = attrgetter(*(name if name == "stretch" else f"job_metrics.{name}" for name in GLOBAL_INDEX))
_COLUMNS = [_KNOWN.index(name) if name in _KNOWN else len(_KNOWN) for name in RANK_FEATURES]


def state_of(window: MetricWindow) -> State:
    """The state vectors of a metric window: computed in float64, rounded once to float32, packed little-endian."""
    node, sigma_norm_sq = window.node_metrics, window.job_metrics.sigma_norm_sq
    sigma_norm = None if sigma_norm_sq is None or sigma_norm_sq < 0 else math.sqrt(sigma_norm_sq)
    shared = (*_OF_NODE(node), sigma_norm, sigma_norm_sq, None)
    rows = []
    for rank in window.ranks:
        network, time_s, traffic = rank.network, rank.training.step_time_s * window.num_steps, _NO_TRAFFIC
        if window.probe in ("ebpf", "proc"):  # counted over the collector's own interval, not over the window
            time_s = node.interval_s or 0.0
        if network is not None:
            rates = (network.tx_bytes / time_s, network.rx_bytes / time_s) if time_s > 0 else (None, None)
            traffic = (*rates, network.retransmits, network.srtt_us)
        rows.append((*_OF_RANK(rank), *traffic, *shared))  # as `_KNOWN`
    return State(
        job=window.job,
        generation=window.generation,
        window=window.window,
        node=window.node,
        feature_version=FEATURE_VERSION,
        ranks=tuple(rank.rank for rank in window.ranks),
        features=_pack(np.array(rows, dtype=np.float64)[:, _COLUMNS]),
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


def _pack(values: npt.NDArray[np.float64]) -> bytes:
    """The values as float32; what float32 cannot hold is as little known as what was not measured."""
    with np.errstate(over="ignore"):
        rounded = values.astype("<f4")
    rounded[~np.isfinite(rounded)] = np.nan
    return rounded.tobytes()
