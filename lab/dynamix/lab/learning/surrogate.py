"""An analytic surrogate of virtual clusters: thousands of jobs at once, for policies to learn on. Only numpy.

Clock, disturbances and bounds are those of the scenarios (`lab.simulator.clock`); training is a formula in place of a
model. In u steps of unlimited batches a job comes as far as in sum of p steps of B samples, h of them between two
averagings of N ranks:

    p = (B / B_0)^0.15 B / (B + B_noise(u)) / (1 + k (h - 1))    worth of a step beside one of an unlimited batch
    B_noise(u) = 30 + 45 sqrt(u)                                samples; McCandlish et al. (arXiv 1812.06162)
    k = 0.1 (N / 8)^0.7 / (1 + B / B_noise)^1.5                 share of progress that each further local step loses

These constants, and `CURVE`, fit `fashion-14-mlp` under SGD with the square-root rule, for B from 32 to 4,096 and h
from 1 to 32; with Adam the exponent is 0.3. Each job's clock and training differ by random factors from the scenario's.
Approximate are a split by speed (shares are not whole, a changed speed is followed one step after two in a row show it)
and the time of coded gradients. So the surrogate ranks policies, and no figure of it is reported as a result.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dynamix.arbitrator.learned.policy import (
    DELTAS,
    EMPTY_MEMORY,
    LAG,
    Columns,
    Levers,
    facts_of,
    lever_inputs,
    published_inputs,
)
from dynamix.arbitrator.learned.policy_file import Choices, Network, PolicyFile
from dynamix.arbitrator.learning.rollout import Trajectory
from dynamix.lab.simulator.scenario import BYTES_PER_MBIT, Congestion, Scenario, Stragglers, Workers
from dynamix.lab.workloads import workload_named
from dynamix.reward.formula import SMALLEST_PUBLISHED_SIZE_LOG2, Weights

Array32 = npt.NDArray[np.float32]
Array64 = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Chooser = Callable[[Array32], tuple[Choices, Array64, Array64]]
"""Choices of all levers, log-probabilities and values, for decisions x inputs."""

CURVE = ((0, 5, 17, 28, 40, 60, 105, 150, 240, 400), (0.1, 0.6, 0.7, 0.75, 0.8, 0.83, 0.85, 0.86, 0.87, 0.88))
"""u, and the held-out accuracy there."""
NOISE_START, NOISE_GROWTH = 30.0, 45.0
RATE_EXPONENT = 0.15
LOCAL_LOSS, LOCAL_LOSS_POWER, LOCAL_LOSS_DECAY = 0.1, 0.7, 1.5
NOISE_ERROR = 0.25
"""Sigma of the measured noise scale, lognormal."""
UNKNOWN = 0.03
"""Share of inputs that are unknown."""
CHANGED = math.log(1.25)
"""Two times in a row that agree within this factor are a rank's new speed."""
REWARD_SCALE = 0.1
"""Factor on log2, so that discounted returns are about 1."""
INT8_BYTES = 0.26
"""Share of a gradient's bytes, with the scales of its blocks."""


class SurrogateJobs:
    """E jobs of W ranks each, which train in step with each other, window by window."""

    def __init__(self, scenarios: Sequence[Scenario], num_jobs: int, *, seed: int, spread: float = 0.5) -> None:
        """Jobs of these scenarios in turn; all have as many workers and steps per window as the first.

        Each job's rates, bandwidth, gradient, disturbances and training are multiplied by factors 2^x, x normal with
        the deviation `spread`; with 0 they are the scenario's.
        """
        self.random = np.random.Generator(np.random.Philox(key=seed))
        self._spread = spread
        self.scenarios = [scenarios[index % len(scenarios)] for index in range(num_jobs)]
        self.num_jobs, self.num_ranks = num_jobs, scenarios[0].world_size
        self.window_steps = scenarios[0].window_steps
        shape = (num_jobs, self.num_ranks)

        def factors(scale: float = 1.0, *, of_ranks: bool = False) -> Array64:
            drawn = self.random.standard_normal(shape if of_ranks else (num_jobs, 1))
            return np.exp2(scale * spread * drawn)

        def of_jobs(number: Callable[[Scenario], float]) -> Array64:
            return np.array([[float(number(scenario))] for scenario in self.scenarios])

        def of_ranks(number: Callable[[Workers], float | None]) -> Array64:
            return np.array([[float(number(worker) or 0) for worker in s.per_worker] for s in self.scenarios])

        links = of_ranks(lambda worker: worker.bandwidth_mbit_s)
        links = np.where(links > 0, links, of_jobs(lambda scenario: scenario.network.bandwidth_mbit_s))
        self._bandwidth = BYTES_PER_MBIT * links * factors()
        self._latency_s = of_jobs(lambda scenario: scenario.network.latency_s)
        self._overlap = of_jobs(lambda scenario: scenario.network.overlap)[:, 0]
        self._buckets = of_jobs(lambda scenario: scenario.network.num_buckets)[:, 0]
        self._bytes = factors() * of_jobs(
            lambda scenario: scenario.network.gradient_bytes or workload_named(scenario.workload).gradient_bytes
        )
        per_byte_s = of_jobs(lambda scenario: scenario.coding.int8 / 1e6)
        bucket_s = of_jobs(
            lambda scenario: 2 * (scenario.world_size - 1) * scenario.coding.message_s + scenario.coding.bucket_s
        )
        self._coding_s = (per_byte_s * self._bytes)[:, 0] + bucket_s[:, 0] * self._buckets
        speeds = factors()
        self._overhead_s = speeds * of_ranks(lambda worker: worker.overhead_s)
        self._s_per_sample = speeds * factors(0.3, of_ranks=True) / of_ranks(lambda worker: worker.samples_per_s)
        self._saturation = of_ranks(lambda worker: worker.saturation)
        self._disturb(factors, shape)

        self.low = of_jobs(lambda scenario: max(1, scenario.min_local_batch_size)) + np.zeros(shape)
        self.high = np.array([scenario.max_local_batch_sizes for scenario in self.scenarios], dtype=np.float64)
        self.initial = np.array([scenario.local_batch_sizes() for scenario in self.scenarios], dtype=np.float64)
        self.facts = facts_of(self.scenarios, np.ones(num_jobs))
        self._noise_factor = factors()[:, 0]
        self._loss_factor = factors()[:, 0] * (self.num_ranks / 8) ** LOCAL_LOSS_POWER
        self._exponent = RATE_EXPONENT * (1.0 + self.facts["is_adam"]) + 0.1 * np.log2(factors()[:, 0])
        self._targets = of_jobs(lambda scenario: scenario.target_accuracy)[:, 0]

        self.time_s = np.zeros(num_jobs)
        self.progress = np.zeros(num_jobs)
        """Steps of unlimited batches so far."""
        self.reached_s = np.full(num_jobs, np.nan)
        """When the target was reached."""
        self._seen = np.full(shape, np.nan)
        """The accuracy that each rank saw last."""
        self._round_every, self._round_steps = np.ones(num_jobs), np.zeros(num_jobs)
        self._round_s, self._round_samples = np.zeros(shape), np.zeros(shape)
        """Sums of the round of local steps that goes on."""
        self._rate = 1.0 / self._s_per_sample
        """The split's belief: samples per second of each rank."""
        self._newest = np.full(shape, np.nan)

    def _disturb(self, factors: Callable[[], Array64], shape: tuple[int, int]) -> None:
        """Begin stragglers and congestion."""
        slow = [scenario.stragglers or Stragglers() for scenario in self.scenarios]
        self._jitter = np.array([[each.jitter] for each in slow])
        self._slow_factor = 1.0 + (np.array([[each.factor] for each in slow]) - 1.0) * factors()
        stays_s = np.array([[[each.mean_normal_s, each.mean_slow_s]] for each in slow])
        self._slow = _Switches(self.random, stays_s * factors()[..., None], shape)
        jams = [scenario.congestion or Congestion() for scenario in self.scenarios]
        self._is_shared = np.array([[each.shared] for each in jams])
        self._retransmits_per_s = np.array([[each.retransmits_per_s] for each in jams])
        self._jam_factor = 1.0 + (np.array([[each.factor] for each in jams]) - 1.0) * factors()
        stays_s = np.array([[[each.mean_clear_s, each.mean_congested_s]] for each in jams])
        self._jams = _Switches(self.random, stays_s * factors()[..., None], shape)

    @property
    def accuracy(self) -> Array64:
        """On held-out data."""
        return np.interp(self.progress, *CURVE)

    @property
    def noise_scale(self) -> Array64:
        """B_noise now."""
        return self._noise_factor * (NOISE_START + NOISE_GROWTH * np.sqrt(self.progress))

    def worth(self, totals: Array64, every: Array64) -> Array64:
        """p: progress of a step of each job."""
        relative = totals / self.noise_scale
        loss = LOCAL_LOSS * self._loss_factor / (1.0 + relative) ** LOCAL_LOSS_DECAY * (every - 1.0)
        grown = (totals / self.facts["base"]) ** self._exponent
        worth: Array64 = grown * relative / (1.0 + relative) / (1.0 + loss)
        return worth

    def partly_unknown(self, inputs_DI: Array32) -> Array32:
        """Inputs without some that are drawn, so that a policy learns to do without any of them."""
        if self._spread == 0.0:
            return inputs_DI
        return np.where(self.random.random(inputs_DI.shape) < UNKNOWN, np.float32(np.nan), inputs_DI)

    def run_window(self, sizes: Array64, levers: Levers, *, tracks: bool = True) -> Columns:
        """Train a window with these sizes (E x W) and this exchange; `tracks`: ranks divide their sum by speed.

        Returns what it shows: the features that learned policies have inputs of, and of each job what no policy sees:
        `progress`, the steps of unlimited batches gained, and `window_s`.
        """
        totals, before, begun_s, accuracy = sizes.sum(axis=1), self.progress, self.time_s, self.accuracy
        compute_s, sync_s, zeros = np.zeros_like(sizes), np.zeros_like(sizes), np.zeros_like(sizes)
        num_samples, retransmits = zeros, zeros
        every, is_local, is_int8 = levers.every, levers.every > 1, levers.is_int8 > 0
        goes_on = (every == self._round_every)[:, None]  # with another period a new round begins
        round_s, round_samples = (np.where(goes_on, each, 0.0) for each in (self._round_s, self._round_samples))
        round_steps, self._round_every = np.where(goes_on[:, 0], self._round_steps, 0.0), every
        for _ in range(self.window_steps):
            if tracks:
                share = self._rate / self._rate.sum(axis=1, keepdims=True)
                sizes = np.clip(share * totals[:, None], self.low, self.high)
                sizes = sizes * (totals / sizes.sum(axis=1))[:, None]
            slowdown = np.where(self._slow.at(self.time_s), self._slow_factor, 1.0)
            slowdown = slowdown * np.exp(self._jitter * self.random.standard_normal(sizes.shape))
            jammed = self._jams.at(self.time_s)
            jammed = np.where(self._is_shared, jammed[:, :1], jammed)
            congestion = np.where(jammed, self._jam_factor, 1.0)
            own_s = slowdown * (self._overhead_s + np.maximum(sizes, self._saturation) * self._s_per_sample)
            round_steps = round_steps + 1.0
            shares = round_steps >= every  # gradients, or the moves of a round
            round_before_s = round_s.max(axis=1)
            round_s, round_samples = round_s + own_s, round_samples + sizes
            slowest_s = round_s.max(axis=1)
            exposed_s = self._exposed_s(congestion, slowdown, np.where(is_local, 0.0, slowest_s), is_int8)
            exposed_s = np.where(shares, exposed_s, 0.0)
            step_s = slowest_s - round_before_s + exposed_s
            compute_s, num_samples = compute_s + own_s, num_samples + sizes
            sync_s = sync_s + np.where(shares[:, None], slowest_s[:, None] - round_s + exposed_s[:, None], 0.0)
            retransmits = retransmits + jammed * self._retransmits_per_s * step_s[:, None]
            self.time_s = self.time_s + step_s
            self.progress = self.progress + self.worth(totals, every)
            if tracks:
                self._believe(round_samples / round_s, shares)
            round_s, round_samples = (np.where(shares[:, None], 0.0, each) for each in (round_s, round_samples))
            round_steps = np.where(shares, 0.0, round_steps)
        self._round_s, self._round_samples, self._round_steps = round_s, round_samples, round_steps
        self.reached_s = np.where(
            np.isnan(self.reached_s) & (self.accuracy >= self._targets), self.time_s, self.reached_s
        )
        steps, window_s = self.window_steps, self.time_s - begun_s
        error = np.exp(NOISE_ERROR * self.random.standard_normal(self.num_jobs))
        noise_scale = self.noise_scale * error * (1.0 + 0.2 * np.log2(every))
        sigma_2 = np.repeat((noise_scale / totals)[:, None], self.num_ranks, axis=1)
        seen = self.accuracy[:, None] + np.sqrt(0.1 / num_samples) * self.random.standard_normal(sizes.shape)
        change, self._seen = seen - self._seen, seen
        job = {
            "job_accuracy": seen.mean(axis=1),
            "job_loss": 2.5 * (1.0 - seen.mean(axis=1)),
            "job_held_out_accuracy": accuracy,
            "job_progress": np.full(self.num_jobs, np.nan),
        }
        return {
            "num_samples": num_samples,
            "compute_time_s": compute_s / steps,
            "sync_time_s": sync_s / steps,
            "step_time_s": np.repeat((window_s / steps)[:, None], self.num_ranks, axis=1),
            "accuracy": seen,
            "accuracy_change": change,
            "sigma_norm": np.sqrt(sigma_2),
            "sigma_norm_sq": sigma_2,
            "cpu_time_ratio": compute_s / window_s[:, None],
            "memory_ratio": num_samples / steps / self.high,
            "tx_bytes_per_s": 2.0 * self._bytes * steps / window_s[:, None] + zeros,
            "retransmits": retransmits,
            **{name: np.repeat(values[:, None], self.num_ranks, axis=1) for name, values in job.items()},
            "noise_scale": noise_scale,
            "progress": self.progress - before,
            "window_s": window_s,
        }

    def _exposed_s(self, congestion: Array64, slowdown: Array64, computed_s: Array64, is_int8: Flags) -> Array64:
        """Communication that computing does not hide; a round of local steps hides none."""
        N, K = self.num_ranks, self._buckets
        latency_s = congestion * self._latency_s
        sending_s = congestion * self._bytes / (K[:, None] * N * self._bandwidth)
        ring_s = 2 * (N - 1) * np.maximum((latency_s + sending_s).mean(axis=1), sending_s.max(axis=1))
        traded_s = (latency_s + INT8_BYTES * (N - 1) * sending_s).max(axis=1)
        lane_s = traded_s + slowdown.max(axis=1) * self._coding_s / 2 / K
        taken_s = np.where(is_int8, (K + 1) * lane_s, K * ring_s)
        last_s = np.where(is_int8, 2 * lane_s, ring_s)
        exposed_s: Array64 = np.maximum(last_s, taken_s - self._overlap * computed_s)
        return exposed_s

    def _believe(self, measured: Array64, shared: Flags) -> None:
        """Follow measured samples per second of work where a second time in a row shows them."""
        with np.errstate(invalid="ignore", divide="ignore"):
            agrees = np.abs(np.log(measured / self._newest)) < CHANGED
            is_near = np.abs(np.log(measured / self._rate)) < CHANGED
        averaged = self._rate + np.where(is_near, 0.2, 1.0) * (measured - self._rate)
        self._rate = np.where(shared[:, None] & (agrees | is_near), averaged, self._rate)
        self._newest = np.where(shared[:, None], measured, self._newest)


class _Switches:
    """Two-state Markov processes, E x W of them, as `lab.simulator.clock.Switching` in arrays."""

    def __init__(self, random: np.random.Generator, mean_s: Array64, shape: tuple[int, int]) -> None:
        """`mean_s`, E x 1 x 2, has the mean stays off and on."""
        self._random = random
        self._mean_s = np.broadcast_to(mean_s, (*shape, 2))
        self._on: Flags = random.random(shape) < self._mean_s[..., 1] / self._mean_s.sum(axis=2)
        means_s = np.where(self._on, self._mean_s[..., 1], self._mean_s[..., 0])
        self._next_s = random.standard_exponential(shape) * means_s

    def at(self, times_s: Array64) -> Flags:
        """Which are on; times never fall."""
        while (due := self._next_s <= times_s[:, None]).any():
            jobs, ranks = np.nonzero(due)
            self._on[jobs, ranks] ^= True
            stays = self._mean_s[jobs, ranks, self._on[jobs, ranks].astype(np.int64)]
            self._next_s[jobs, ranks] += stays * self._random.standard_exponential(len(jobs))
        return self._on


# --- trajectories


class SurrogateTask(NamedTuple):
    """Jobs of alike scenarios to learn from."""

    scenarios: tuple[Scenario, ...]
    num_jobs: int
    seed: int
    policy: bytes
    """The file."""
    num_windows: int
    weights: Weights | None
    """Weights of the published reward; `None`: progress per second."""

    @property
    def name(self) -> str:
        """Scenarios and seed in words, for messages."""
        return f"surrogate of {', '.join(scenario.name for scenario in self.scenarios)}, seed {self.seed}"


def play_surrogate(task: SurrogateTask) -> Trajectory:
    """Play jobs under a policy that explores; half of them begin somewhere in their training."""
    file, jobs = PolicyFile.from_bytes(task.policy), SurrogateJobs(task.scenarios, task.num_jobs, seed=task.seed)
    jobs.progress = np.maximum(jobs.random.uniform(-200, 200, task.num_jobs), 0.0)
    choose = partial(Network(file).choose, random=jobs.random)
    if file.metadata.action_set == "levers":
        return play_levers(jobs, choose, task.num_windows)
    return play_deltas(jobs, choose, task.num_windows, task.weights)


def play_levers(jobs: SurrogateJobs, choose: Chooser, num_windows: int, *, until_target: bool = False) -> Trajectory:
    """The trajectory of jobs whose levers are moved after each window; a decision is rewarded `LAG` windows later.

    The reward is the logarithm of progress per second, over that of the first window: what counts is by which factor a
    decision makes a job faster, whatever its cluster and model.
    """
    ones = np.ones(jobs.num_jobs)
    first = Levers(jobs.initial.sum(axis=1), ones, 0.0 * ones)
    pipeline, memory = [first] * LAG, np.tile(EMPTY_MEMORY, (jobs.num_jobs, 1))
    rows, speeds = [], []
    for window in range(num_windows):
        active, decided = pipeline.pop(0), pipeline[-1]
        shares = active.batch[:, None] / jobs.num_ranks + 0.0 * jobs.low
        seen = jobs.run_window(shares, active)
        facts = {**jobs.facts, "windows_log2": np.full(jobs.num_jobs, math.log2(1.0 + window))}
        inputs_EI, memory = lever_inputs(seen, active, decided, facts, memory)
        inputs_EI = jobs.partly_unknown(inputs_EI)
        choices_EL, logprobs_E, values_E = choose(inputs_EI)
        pipeline.append(decided.moved(choices_EL, facts))
        rows.append((inputs_EI, choices_EL, logprobs_E, values_E))
        speeds.append(np.log2(seen["progress"] / seen["window_s"]))
        if until_target and len(rows) > LAG and not np.isnan(jobs.reached_s).any():
            break
    return _trajectory(rows, REWARD_SCALE * (np.array(speeds) - speeds[0]))


def play_deltas(
    jobs: SurrogateJobs, choose: Chooser, num_windows: int, weights: Weights | None, *, until_target: bool = False
) -> Trajectory:
    """The trajectory of jobs whose ranks change their sizes as published, and earn the published reward.

    `weights.eta` counts in jobs of adaptive optimizers. Without weights all ranks earn what `play_levers` rewards.
    """
    ones = np.ones(jobs.num_jobs)
    exact = Levers(ones, ones, 0.0 * ones)
    pipeline, rows, rewards = [jobs.initial] * LAG, [], []
    for _ in range(num_windows):
        sizes, decided = pipeline.pop(0), pipeline[-1]
        seen = {**jobs.run_window(sizes, exact, tracks=False), "decided_local_batch_size": decided}
        inputs_DI = jobs.partly_unknown(published_inputs(seen))
        choices_DL, logprobs_D, values_D = choose(inputs_DI)
        wanted = decided + np.array(DELTAS)[choices_DL[:, 0]].reshape(decided.shape)
        pipeline.append(np.clip(wanted, jobs.low, jobs.high))
        rows.append((inputs_DI, choices_DL, logprobs_D, values_D))
        if weights is None:
            speed = REWARD_SCALE * np.log2(seen["progress"] / seen["window_s"])
            rewards.append(np.repeat(speed[:, None], jobs.num_ranks, axis=1))
        else:
            noise = seen["sigma_norm_sq"] + seen["sigma_norm"]
            rewards.append(
                weights.accuracy * seen["accuracy"]
                + weights.alpha * np.maximum(np.nan_to_num(seen["accuracy_change"]), 0.0)
                - weights.beta * seen["step_time_s"]
                - weights.delta * (np.log2(sizes) - SMALLEST_PUBLISHED_SIZE_LOG2)
                - weights.eta * noise * jobs.facts["is_adam"][:, None]
            )
        if until_target and len(rows) > LAG and not np.isnan(jobs.reached_s).any():
            break
    paid = np.array(rewards).reshape(len(rows), -1)
    return _trajectory(rows, paid if weights is not None else paid - paid[0])


def _trajectory(rows: list[tuple[Any, ...]], rewards_TD: Array64) -> Trajectory:
    inputs, choices, logprobs, values = map(np.stack, zip(*rows, strict=True))
    last = len(rows) - LAG
    return Trajectory(
        inputs_TDI=inputs[:last],
        actions_TDL=choices[:last],
        logprobs_TD=logprobs[:last],
        values_TD=values[:last],
        rewards_TD=rewards_TD[LAG:],
        num_windows_T=np.ones(last, dtype=np.int64),
        next_values_D=values[last],
        terminated=False,
    )
