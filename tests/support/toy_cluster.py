"""A cluster made of formulas: what ranks would measure at given sizes, and the batch that is best for it."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from dynamix.arbitrator.policies.policy import Array32, Array64, Decision, Policy
from dynamix.schemas.features import GLOBAL_FEATURES, GLOBAL_INDEX, RANK_FEATURES, RANK_INDEX
from dynamix.schemas.messages import Job

LAG = 2
"""The action of window t rules window t + 2."""


def features_of(
    samples: Array64, compute_s: Array64, step_s: float, decided: tuple[int, ...]
) -> tuple[Array32, Array32]:
    """Features of a window: each rank's samples in it, and what a step took them and all."""
    obs_WF = np.full((len(samples), len(RANK_FEATURES)), np.nan, dtype=np.float32)
    columns = {
        "num_samples": samples,
        "compute_time_s": compute_s,
        "sync_time_s": step_s - compute_s,
        "step_time_s": step_s,
        "age_windows": 0.0,
        "decided_local_batch_size": decided,
    }
    for name, values in columns.items():
        obs_WF[:, RANK_INDEX[name]] = values
    global_F = np.full(len(GLOBAL_FEATURES), np.nan, dtype=np.float32)
    global_F[GLOBAL_INDEX["step_time_s"]] = step_s
    return obs_WF, global_F


@dataclass
class ToyCluster:
    """compute_i = overhead + b_i / rate_i; exposed = max(comm / 8, comm - overlap * slowest compute)."""

    rates: Array64
    overhead_s: float = 0.002
    communication_s: float = 0.01
    overlap: float = 0.0
    noise_scale: float = 1000.0
    jitter: float = 0.0
    tracking: bool = False
    """Whether the sizes are divided by speed, as training processes would, whatever the decision's division."""
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def step_time_s(self, sizes: Array64) -> float:
        slowest = float((self.overhead_s + sizes / self.rates).max())
        return slowest + self.exposed_s(slowest)

    def exposed_s(self, slowest_s: float) -> float:
        return max(self.communication_s / 8, self.communication_s - self.overlap * slowest_s)

    def balanced(self, total: float, job: Job) -> Array64:
        """Real sizes of equal compute times within the bounds, by bisection on the time."""
        low, high = 0.0, 1e6
        for _ in range(50):
            middle = (low + high) / 2
            sizes = self._clipped(middle, job)
            low, high = (middle, high) if sizes.sum() < total else (low, middle)
        return self._clipped(high, job)

    def best(self, job: Job, exponent: float = 0.25) -> float:
        """The B of the greatest B^exponent B / (B + noise) / T(B), by brute force."""
        totals = np.geomspace(job.min_local_batch_size * job.world_size, sum(job.max_local_batch_sizes), 300)
        noise = self.noise_scale
        return float(
            max(totals, key=lambda b: b ** (1 + exponent) / (b + noise) / self.step_time_s(self.balanced(b, job)))
        )

    def observe(self, sizes: Array64, job: Job, decided: tuple[int, ...]) -> tuple[Array32, Array32]:
        """The features of a window of `job.window_steps` steps."""
        noisy = 1 + self.jitter * self.rng.standard_normal(len(sizes)) / np.sqrt(job.window_steps)
        compute_s = (self.overhead_s + sizes / self.rates) * noisy
        slowest = float(compute_s.max())
        step_s = slowest + self.exposed_s(slowest)
        obs_WF, global_F = features_of(sizes * job.window_steps, compute_s, step_s, decided)
        global_F[GLOBAL_INDEX["noise_scale"]] = self.noise_scale
        global_F[GLOBAL_INDEX["global_batch_size"]] = sizes.sum()
        global_F[GLOBAL_INDEX["throughput"]] = sizes.sum() / step_s
        return obs_WF, global_F

    def run(
        self, policy: Policy, job: Job, windows: int, before: Callable[[int], None] = lambda _: None
    ) -> list[Decision]:
        """The policy's decisions, each ruling `LAG` windows later; `before` may change the cluster."""
        decided, carry, decisions = job.initial_local_batch_sizes, b"", []
        for window in range(windows):
            before(window)
            ruling = (decisions[window - LAG].allocation if window >= LAG else job.initial_allocation).local_batch_sizes
            sizes = self.balanced(sum(ruling), job) if self.tracking else np.array(ruling, dtype=np.float64)
            decision = policy.decide(job, window, *self.observe(sizes, job, decided), carry)
            decided, carry = decision.allocation.local_batch_sizes, decision.carry
            decisions.append(decision)
        return decisions

    def _clipped(self, time_s: float, job: Job) -> Array64:
        sizes: Array64 = np.clip(
            (time_s - self.overhead_s) * self.rates, job.min_local_batch_size, job.max_local_batch_sizes
        )
        return sizes
