"""A cluster as a queue of events: ranks compute buckets of a gradient, links carry them. No formula of a step's time.

Written apart from the model that policies fit and from the virtual clock, to check what they decide. Towards the end of
its computing a rank has the buckets of its gradient ready, one after the other; a bucket travels, one at a time, when
all ranks have it. Under tracking the training process's own fast loop divides the batch after every step.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from random import Random

import numpy as np
from tests.support.toy_cluster import LAG, features_of

from dynamix.arbitrator.policies.policy import Array32, Policy
from dynamix.schemas.features import GLOBAL_INDEX
from dynamix.schemas.messages import Job
from dynamix.schemas.messages.allocation import Allocation
from dynamix.trainer.data.plan import Schedule
from dynamix.trainer.steering.fast_loop import FastLoop


@dataclass(frozen=True)
class Device:
    """What a step costs a rank: fixed seconds, seconds per sample, and samples below which a batch costs no less."""

    seconds_per_sample: float
    fixed_s: float = 0.0
    saturation: int = 0

    def time_s(self, size: int) -> float:
        """How long it computes."""
        return self.fixed_s + max(size, self.saturation) * self.seconds_per_sample


@dataclass
class EventCluster:
    """Ranks and the links between them."""

    devices: Sequence[Device]
    bucket_s: Sequence[float] = (0.002,) * 4
    """How long each bucket of the gradient travels."""
    overlap: float = 0.5
    """Share of a rank's computing before whose end its buckets become ready, evenly; the last one at the end."""
    jitter: float = 0.0
    noise_scale: float = 1000.0
    seed: int = 0

    def __post_init__(self) -> None:
        self._random = Random(self.seed)

    def step(self, sizes: Sequence[int], *, jitter: float | None = None) -> tuple[float, list[float]]:
        """Run one step; how long it took, and when each rank had its last bucket ready."""
        events: list[tuple[float, int, int]] = []
        ends = []
        for rank, (device, size) in enumerate(zip(self.devices, sizes, strict=True)):
            end = device.time_s(size) * self._random.lognormvariate(0, self.jitter if jitter is None else jitter)
            ends.append(end)
            last = len(self.bucket_s) - 1
            for bucket in range(last + 1):
                left = self.overlap * end * (last - bucket) / max(last, 1)
                events.append((end - left, bucket, rank))
        heapify(events)
        missing = [len(ends)] * len(self.bucket_s)
        is_free_s = 0.0
        while events:
            now_s, bucket, _ = heappop(events)
            missing[bucket] -= 1
            if missing[bucket] == 0:
                is_free_s = max(is_free_s, now_s) + self.bucket_s[bucket]
        return is_free_s, ends

    def run(self, policy: Policy, job: Job, num_windows: int) -> list[int]:
        """The global batch that the policy decides after each window."""
        schedule = Schedule(job.initial_allocation)
        loop = FastLoop(schedule, job.min_local_batch_size, job.max_local_batch_sizes)
        decided, carry, totals, pending = job.initial_local_batch_sizes, b"", [], [job.initial_allocation] * LAG
        for window in range(num_windows):
            loop.adopt(window * job.window_steps, pending.pop(0))
            obs_WF, global_F = self._window(job, window, (schedule, loop), decided)
            decision = policy.decide(job, window, obs_WF, global_F, carry)
            decided, carry = decision.allocation.local_batch_sizes, decision.carry
            pending.append(decision.allocation)
            totals.append(sum(decided))
        return totals

    def best_time_s(self, total: int, job: Job) -> float:
        """The time of a step with the best division of a global batch: each sample goes where it costs least."""
        sizes = [job.min_local_batch_size] * len(self.devices)
        places = [(*self._cost(rank, sizes[rank] + 1), rank) for rank in range(len(sizes))]
        heapify(places)
        for _ in range(total - sum(sizes)):
            *_, rank = places[0]
            sizes[rank] += 1
            is_full = sizes[rank] >= job.max_local_batch_sizes[rank]
            heapreplace(places, (math.inf, 0, rank) if is_full else (*self._cost(rank, sizes[rank] + 1), rank))
        return self.step(sizes, jitter=0.0)[0]

    def _cost(self, rank: int, size: int) -> tuple[float, int]:
        """What a rank takes for so many samples; of equal times the one with fewer comes first."""
        return self.devices[rank].time_s(size), size

    def _window(
        self, job: Job, window: int, loops: tuple[Schedule, FastLoop], decided: tuple[int, ...]
    ) -> tuple[Array32, Array32]:
        """What the ranks report of a window that they train."""
        schedule, loop = loops
        num_ranks, first = len(self.devices), window * job.window_steps
        samples, compute_s, total_s = np.zeros(num_ranks), np.zeros(num_ranks), 0.0
        for step in range(first, first + job.window_steps):
            allocation: Allocation = schedule.allocation_at(step)
            sizes = allocation.local_batch_sizes
            step_s, ends = self.step(sizes)
            samples += sizes
            compute_s += ends
            total_s += step_s
            seconds = [end / size if size else 0.0 for end, size in zip(ends, sizes, strict=True)]
            if allocation.split == "tracking":
                loop.observe_times(seconds, step + 1, sizes)
        obs_WF, global_F = features_of(samples, compute_s / job.window_steps, total_s / job.window_steps, decided)
        global_F[GLOBAL_INDEX["noise_scale"]] = self.noise_scale
        global_F[GLOBAL_INDEX["throughput"]] = samples.sum() / total_s
        return obs_WF, global_F
