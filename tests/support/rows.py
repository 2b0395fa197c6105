"""Rows of ranks, for tests that need one in which everything is known."""

from typing import Any

from dynamix.schemas.messages import NetworkMetrics, RankRow
from dynamix.trainer.exchange.codec import CodedSquares
from dynamix.trainer.gradient.noise import NoiseSums
from dynamix.trainer.measurement.meter import Row


def row(**changes: Any) -> Row:
    """A rank's row, some of it changed: of its message, or of what is not in it."""
    message: dict[str, Any] = {
        "rank": 0,
        "local_rank": 1,
        "pid": 1234,
        "pid_start_ticks": 2**40 + 1,
        "pid_namespace": 4026531836,
        "uid": 1000,
        "local_batch_size": 0,
        "pending_local_batch_size": 0,
        "num_samples": 100,
        "loss_sum": 50.0,
        "num_correct": 75.0,
        "data_time_s": 0.3,
        "compute_time_s": 0.75,
        "sync_time_s": 0.75,
        "update_time_s": 0.1,
        "sockets": NetworkMetrics(tx_bytes=7, rx_bytes=8, retransmits=9, srtt_us=10.0),
        "device_memory_bytes": 11,
        "device_memory_total_bytes": 12,
        "times_split": True,
        "link_bytes_per_s": 15.0,
        "link_peer": 16,
        "waiting_time_s": 0.25,
    }
    beside: dict[str, Any] = {
        "noise": NoiseSums(2, 1.0, 2.0, 3.0, 4.0),
        "held_out_accuracy": 0.5,
        "learning_rate": 0.25,
        "coded": CodedSquares(3.0, 2.0),
        "wall_s": 18.0,
        "data_digest": 19,
    }
    changed = {name: value for name, value in changes.items() if name in message}
    return Row(rank=RankRow(**(message | changed)), **(beside | {n: v for n, v in changes.items() if n not in message}))
