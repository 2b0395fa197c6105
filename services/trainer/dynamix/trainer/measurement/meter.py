"""The meter of one rank: everything that it observes of itself, taken as one row at the end of a window."""

from dataclasses import dataclass

import torch

from .clock import AnyClock, StepTimes
from .memory import device_memory
from .process import ProcessIdentity
from .rows import Row, make_row
from .sockets import PeerSockets
from .window import WindowSteps


@dataclass(frozen=True, kw_only=True)
class RankMeter:
    """The instruments of one rank."""

    local_rank: int
    process: ProcessIdentity
    clock: AnyClock
    steps: WindowSteps
    sockets: PeerSockets
    device: torch.device
    times_split: bool
    """Whether a hook sees the gradient's buckets, and so where waiting for others begins."""

    def take_row(self, times: list[StepTimes], held_out_accuracy: float | None) -> Row:
        """The row of the steps since the last call; `times` are theirs."""
        sums = self.steps.take_sums()
        return make_row(
            self.local_rank,
            self.process,
            num_samples=sums.num_samples,
            loss_sum=sums.loss_sum,
            num_correct=sums.num_correct,
            times=times,
            times_split=self.times_split,
            noise=sums.noise,
            sockets=self.sockets.read(),
            device=device_memory(self.device),
            held_out_accuracy=held_out_accuracy,
        )
