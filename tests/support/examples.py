"""Example messages: plausible values, and every field that matters can be changed."""

from typing import Any

import msgspec

from dynamix.schemas.features import state_of
from dynamix.schemas.messages import (
    Action,
    Applied,
    ArmRecord,
    Event,
    GlobalMetrics,
    GradientNoise,
    Job,
    JobProfile,
    JobTotals,
    MetricWindow,
    NetworkMetrics,
    NodeMetrics,
    NodeRanks,
    RankMetrics,
    RankReward,
    RankRow,
    Report,
    Reward,
    State,
    SystemMetrics,
    Trace,
    TrainingMetrics,
)
from dynamix.schemas.messages.allocation import Allocation

JOB = "mnist-0a1b2c3d"


def job(nodes: dict[str, tuple[int, ...]] | None = None, **changes: Any) -> Job:
    layout = nodes or {"node-a": (0, 1), "node-b": (2, 3)}
    world_size = sum(len(ranks) for ranks in layout.values())
    fields: dict[str, Any] = {
        "job": JOB,
        "generation": 0,
        "phase": "running",
        "world_size": world_size,
        "nodes": tuple(NodeRanks(node=node, ranks=ranks) for node, ranks in layout.items()),
        "window_steps": 10,
        "initial_local_batch_sizes": (128,) * world_size,
        "base_global_batch_size": 128 * world_size,
        "min_local_batch_size": 32,
        "max_local_batch_sizes": (1024,) * world_size,
        "optimizer_family": "sgd",
        "policy": "proportional",
        "seed": 7,
    }
    return Job(**(fields | changes))


def row(rank: int = 0, **changes: Any) -> RankRow:
    fields: dict[str, Any] = {
        "rank": rank,
        "local_rank": rank % 2,
        "pid": 1000 + rank,
        "pid_start_ticks": 5000,
        "pid_namespace": 4026531836,
        "uid": 1000,
        "local_batch_size": 128,
        "pending_local_batch_size": 128,
        "num_samples": 1280,
        "loss_sum": 640.0,
        "num_correct": 960.0,
        "data_time_s": 0.1,
        "compute_time_s": 0.5,
        "sync_time_s": 0.3,
        "update_time_s": 0.1,
    }
    return RankRow(**(fields | changes))


def totals(window: int = 0, **changes: Any) -> JobTotals:
    fields: dict[str, Any] = {
        "window": window,
        "num_steps": 10,
        "num_samples": 5120,
        "global_batch_size": 512,
        "loss_sum": 2560.0,
        "num_correct": 3840.0,
        "time_s": 1.0,
        "noise": GradientNoise(trace=100.0, squared_norm=0.05),
    }
    return JobTotals(**(fields | changes))


def report(node: str = "node-a", ranks: tuple[int, ...] = (0, 1), window: int = 0, **changes: Any) -> Report:
    fields: dict[str, Any] = {
        "job": JOB,
        "generation": 0,
        "window": window,
        "node": node,
        "optimizer_family": "sgd",
        "samples_seen": (window + 1) * 5120,
        "rows": tuple(row(rank) for rank in ranks),
        "totals": totals(window),
    }
    return Report(**(fields | changes))


def training(**changes: Any) -> TrainingMetrics:
    fields: dict[str, Any] = {
        "local_batch_size": 128,
        "pending_local_batch_size": 128,
        "num_samples": 1280,
        "loss": 0.5,
        "accuracy": 0.75,
        "accuracy_change": 0.01,
        "step_time_s": 0.1,
        "compute_time_s": 0.05,
        "sync_time_s": 0.03,
        "data_time_s": 0.01,
        "update_time_s": 0.01,
    }
    return TrainingMetrics(**(fields | changes))


def job_metrics(**changes: Any) -> GlobalMetrics:
    fields: dict[str, Any] = {
        "global_batch_size": 512,
        "num_samples": 5120,
        "step_time_s": 0.1,
        "throughput": 5120.0,
        "loss": 0.5,
        "loss_change": -0.02,
        "accuracy": 0.75,
        "accuracy_change": 0.01,
        "held_out_accuracy": 0.7,
        "progress": 0.25,
        "noise_scale": 2000.0,
        "sigma_norm_sq": 4.0,
    }
    return GlobalMetrics(**(fields | changes))


def window(node: str = "node-a", ranks: tuple[int, ...] = (0, 1), window: int = 0, **changes: Any) -> MetricWindow:
    fields: dict[str, Any] = {
        "job": JOB,
        "generation": 0,
        "window": window,
        "node": node,
        "probe": "tcp_info",
        "optimizer_family": "sgd",
        "num_steps": 10,
        "ranks": tuple(
            RankMetrics(
                rank=rank,
                training=training(),
                system=SystemMetrics(cpu_time_ratio=0.9, memory_bytes=1 << 28, memory_ratio=0.02),
                network=NetworkMetrics(tx_bytes=4_000_000, rx_bytes=4_000_000, retransmits=3, srtt_us=80.0),
            )
            for rank in ranks
        ),
        "job_metrics": job_metrics(),
        "node_metrics": NodeMetrics(load_per_cpu=0.5, memory_used_ratio=0.4),
    }
    return MetricWindow(**(fields | changes))


def state(
    node: str = "node-a",
    ranks: tuple[int, ...] = (0, 1),
    window_index: int = 0,
    *,
    generation: int = 0,
    throughput: tuple[float, ...] | None = None,
) -> State:
    """A state whose ranks have the given compute throughput in samples per second."""
    metrics = window(node, ranks, window_index, generation=generation)
    if throughput is not None:
        timed = tuple(
            msgspec.structs.replace(rank, training=training(compute_time_s=rank.training.num_samples / 10 / speed))
            for rank, speed in zip(metrics.ranks, throughput, strict=True)
        )
        metrics = msgspec.structs.replace(metrics, ranks=timed)
    return state_of(metrics)


def trace(node: str = "node-a", ranks: tuple[int, ...] = (0, 1), window: int = 0, **changes: Any) -> Trace:
    fields: dict[str, Any] = {
        "job": JOB,
        "generation": 0,
        "window": window,
        "node": node,
        "ranks": ranks,
        "activity": (2560.0,) * len(ranks),
        "appetite": 512.0,
        "waiting_s": 0.03,
    }
    return Trace(**(fields | changes))


def with_levers(action: Action, **levers: Any) -> Action:
    """The action with some fields of its allocation changed."""
    return msgspec.structs.replace(action, allocation=msgspec.structs.replace(action.allocation, **levers))


def action(window_index: int = 0, **changes: Any) -> Action:
    """An action; levers may be given like its own fields."""
    levers = {name: changes.pop(name) for name in Allocation.__struct_fields__ if name in changes}
    fields: dict[str, Any] = {
        "job": JOB,
        "generation": 0,
        "window": window_index,
        "allocation": Allocation(**{"local_batch_sizes": (128, 128, 128, 128), **levers}),
        "deltas": (0, 0, 0, 0),
        "policy": "static",
        "policy_version": 1,
        "watermark": 0,
    }
    return Action(**(fields | changes))


def profile(**changes: Any) -> JobProfile:
    fields: dict[str, Any] = {
        "family": "mnist-0a1b2c3d",
        "run": 2,
        "job": JOB,
        "generation": 0,
        "ended_sequence": 17,
        "policy": "rule",
        "policy_version": 5,
        "world_size": 4,
        "num_windows": 30,
        "allocation": Allocation((128, 128, 64, 64), "tracking"),
        "memory": b"\x01\x02",
        "arms": (ArmRecord(1.0, 1, 0, (1.5, 4.0)), ArmRecord(1.5, 1, 1, (1.25,))),
    }
    return JobProfile(**(fields | changes))


def sockets(
    tx_bytes: int = 1000, rx_bytes: int = 2000, retransmits: int = 0, srtt_us: float | None = 50.0
) -> NetworkMetrics:
    return NetworkMetrics(tx_bytes=tx_bytes, rx_bytes=rx_bytes, retransmits=retransmits, srtt_us=srtt_us)


def reward(node: str, ranks: tuple[int, ...], window: int = 0, value: float = 0.5, **changes: Any) -> Reward:
    fields: dict[str, Any] = {
        "job": JOB,
        "generation": 0,
        "window": window,
        "node": node,
        "formula": "paper-sgd",
        "ranks": tuple(
            RankReward(rank=rank, reward=value, terms={"accuracy": value + 0.1, "size": -0.1}) for rank in ranks
        ),
    }
    return Reward(**(fields | changes))


def applied(decided: int, effective: int, **changes: Any) -> Applied:
    fields: dict[str, Any] = {
        "job": JOB,
        "generation": 0,
        "decided_window": decided,
        "effective_window": effective,
        "effective_step": effective * 10,
        "local_batch_sizes": (128,) * 4,
    }
    return Applied(**(fields | changes))


def event(window: int, **changes: Any) -> Event:
    fields: dict[str, Any] = {
        "job": JOB,
        "generation": 0,
        "window": window,
        "signature": "size-stuck",
        "service": "arbitrator",
        "value": 0.75,
        "limit": 0.5,
        "explanation": "75% of the ranks were at their minimum of 32",
    }
    return Event(**(fields | changes))
