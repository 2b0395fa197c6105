"""Rows of ranks, for tests that need one in which everything is known."""

from typing import Any

from dynamix.schemas.messages import SocketCounters
from dynamix.trainer.exchange.codec import CodedSquares
from dynamix.trainer.gradient.noise import NoiseSums
from dynamix.trainer.measurement.clock import StepTimes
from dynamix.trainer.measurement.meter import Row
from dynamix.trainer.measurement.sockets import ProcessIdentity


def row(**changes: Any) -> Row:
    """A rank's row, some of it changed."""
    fields: dict[str, Any] = {
        "local_rank": 1,
        "process": ProcessIdentity(pid=1234, start_ticks=2**40 + 1, namespace=4026531836, uid=1000),
        "num_samples": 100,
        "loss_sum": 50.0,
        "num_correct": 75.0,
        "times": StepTimes(0.3, 0.75, 0.75, 0.1),
        "times_split": True,
        "noise": NoiseSums(2, 1.0, 2.0, 3.0, 4.0),
        "sockets": SocketCounters(tx_bytes=7, rx_bytes=8, retransmits=9, srtt_us=10.0),
        "held_out_accuracy": 0.5,
        "device": (11, 12),
        "drift": (13.0, 14.0),
        "learning_rate": 0.25,
        "coded": CodedSquares(3.0, 2.0),
        "link": (15.0, 16),
        "energy_j": 17.0,
        "wall_s": 18.0,
        "data_digest": 19,
    }
    return Row(**(fields | changes))
