"""The baselines: policies that are simple, or published, and that `rule` is compared with; and `stigmergy`."""

import hashlib
import math
from typing import ClassVar

import msgspec
import numpy as np
from msgspec.structs import replace

from dynamix.schemas.apportion import apportion
from dynamix.schemas.messages import Job
from dynamix.schemas.messages.allocation import Allocation
from dynamix.schemas.policies import POLICY_OPTIONS, STIGMERGY, Options, exchange_of

from .policy import (
    Array32,
    Array64,
    Decision,
    NoiseMemory,
    allocation_of,
    decided_sizes,
    job_value,
    option,
    pack,
    steps_of,
    tracks,
    unpack,
)
from .step_time import (
    StepTimeFit,
    by_speed,
    clamp_total,
    divided,
    filtered,
    scaled,
    towards,
    window_of,
)


class Static:
    """`static`: the sizes that the job started with. The baseline of every comparison.

    Its options set the gradient exchange from the first step on, as far as the job permits it (`attach(exchange=...)`).
    """

    name = "static"
    version = 1
    options: ClassVar[Options] = POLICY_OPTIONS["static"]

    def decide(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Decision:  # noqa: ARG002 - the protocol's arguments
        """The job's initial sizes."""
        exchange = exchange_of(job.policy_options)
        allocation = allocation_of(self.options, job, job.initial_local_batch_sizes, exchange)
        return Decision(allocation, reason="the sizes that the job began with")


class Proportional:
    """`proportional`: the job's global batch, divided in proportion to each rank's measured throughput.

    It helps with slow processors only: the time of a slow link does not depend on the sizes.
    """

    name = "proportional"
    version = 1
    options: ClassVar[Options] = POLICY_OPTIONS["proportional"]

    def decide(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Decision:  # noqa: ARG002 - the protocol's arguments
        """A split in proportion to smoothed throughput; the last decision while it is nearly as good.

        A rank that was never measured keeps its size, and the others share what is left of the global batch.
        """
        current = decided_sizes(obs_WF)
        smoothing = option(self.options, job, "smoothing")
        measured = window_of(job, obs_WF, global_F)  # NaN for a stale row and for a rank that had no samples
        previous = np.full(job.world_size, np.nan)
        if len(carry) == 4 * job.world_size:
            kept = np.frombuffer(carry, dtype="<f4").astype(np.float64)
            previous = np.where((kept > 0) & np.isfinite(kept), kept, np.nan)
        smoothed = filtered(previous, measured.samples_W / measured.compute_W, math.inf, smoothing)
        proposed = _split(job, current, smoothed)
        gain = 1 - _step_time_s(proposed, smoothed) / max(_step_time_s(current, smoothed), 1e-12)
        settled = sum(current) == sum(proposed) and gain <= option(self.options, job, "dead_band")
        sizes = current if settled else proposed
        allocation = allocation_of(self.options, job, sizes)
        if allocation.split == "tracking":
            reason = f"the ranks divide {allocation.global_batch_size} samples by their speed after every step"
        elif np.isnan(smoothed).all():
            reason = "no rank's speed is known yet"
        elif settled:
            reason = f"another split would make computing {max(gain, 0.0):.1%} shorter, which is too little"
        else:
            reason = f"divided by measured speed: computing gets {gain:.1%} shorter"
        return Decision(allocation, carry=smoothed.astype("<f4").tobytes(), reason=reason)


def _split(job: Job, current: tuple[int, ...], throughput: Array64) -> tuple[int, ...]:
    """The job's global batch in proportion to throughput, over the ranks whose throughput is known."""
    known = ~np.isnan(throughput)
    if not known.any():
        return current
    sizes = np.array(current, dtype=np.int64)
    left = sum(job.initial_local_batch_sizes) - int(sizes[~known].sum())
    upper = np.array(job.max_local_batch_sizes, dtype=np.int64)[known]
    sizes[known] = apportion(left, throughput[known], np.full_like(upper, job.min_local_batch_size), upper)
    return tuple(sizes.tolist())


def _step_time_s(sizes: tuple[int, ...], throughput: Array64) -> float:
    """Compute time of the slowest measured rank, a lower bound of the step time; 0 if no rank is measured."""
    known = ~np.isnan(throughput)
    return float(np.max(np.asarray(sizes, dtype=np.float64)[known] / throughput[known], initial=0.0))


class Split(Proportional):
    """`split`: the job's global batch as the script chose it, divided by measured speed. The default.

    The training processes divide it after every step (the fast loop). Where they cannot, this policy divides it once
    per window as `proportional` does. Samples per step, steps per epoch and learning rate are those of plain training.
    """

    name = "split"
    options: ClassVar[Options] = POLICY_OPTIONS["split"]


DELTAS = (-100, -25, 0, 25, 100)
"""The published action set in samples (method section 2), in the order in which it is drawn from."""


class Random:
    """`random`: a size change per rank, drawn uniformly from the published set. A baseline for learned policies."""

    name = "random"
    version = 1
    options: ClassVar[Options] = POLICY_OPTIONS["random"]

    def decide(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Decision:  # noqa: ARG002 - the protocol's arguments
        """The last decision plus one delta per rank."""
        draws = keyed_generator(job, window).integers(len(DELTAS), size=job.world_size)
        sizes = tuple(max(0, size + DELTAS[draw]) for size, draw in zip(decided_sizes(obs_WF), draws, strict=True))
        logprobs = (-float(np.log(len(DELTAS))),) * job.world_size
        return Decision(allocation_of(self.options, job, sizes), logprobs=logprobs, reason="drawn at random")


def keyed_generator(job: Job, window: int, purpose: str = "") -> np.random.Generator:
    """A counter-based generator keyed by job, generation, window and seed: a replay draws the same."""
    identity = f"{purpose}{job.job}:{job.generation}:{window}:{job.seed}".encode()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(hashlib.sha256(identity).digest()[:16])))


class _State(msgspec.Struct, array_like=True):
    """The memory of `noise-scale` and `goodput`."""

    noise: NoiseMemory = NoiseMemory()
    fit: StepTimeFit | None = None


class NoiseScale:
    """`noise-scale`: the global batch follows the gradient noise scale (McCandlish et al., arXiv 1812.06162).

    B = multiplier * B_noise; step times are not considered.
    """

    name = "noise-scale"
    version = 4
    options: ClassVar[Options] = POLICY_OPTIONS["noise-scale"]

    def decide(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Decision:  # noqa: ARG002 - the protocol's arguments
        """A limited step towards the multiple. While B_noise was never known the batch stays."""
        state = unpack(_State, carry)
        noise = state.noise.observe(job_value(global_F, "noise_scale"))
        fit = StepTimeFit.of(state.fit, job).observe(job, window_of(job, obs_WF, global_F))
        current = decided_sizes(obs_WF)
        factor, wanted = option(self.options, job, "multiplier"), float(sum(current))
        reason = "no noise scale is known yet"
        if not math.isnan(noise.noise_scale):
            target = max(clamp_total(job, factor * noise.noise_scale), 1)
            wanted = towards(target, max(wanted, 1.0), max_change=option(self.options, job, "max_change"))
            reason = f"towards {factor:g} times the noise scale of {noise.noise_scale:.3g}"
        total = clamp_total(job, wanted)
        if option(self.options, job, "proportional") == 1:
            sizes = by_speed(job, total, fit.model(job), current)
        else:
            sizes = current if total == sum(current) else divided(job, total, np.ones(job.world_size))
        return Decision(allocation_of(self.options, job, sizes), carry=pack(_State(noise, fit.kept())), reason=reason)


NUM_CANDIDATES = 50


class Goodput:
    """`goodput`: Pollux's rule (Qiao et al., OSDI 2021; AdaptDL), applied to a running job once per window.

        goodput(B) = throughput(B) * efficiency(B)
        throughput(B) = B / T(B)
        efficiency(B) = gain / scale,  scale = B / B_0,  gain = (S/B_0 + |G|^2) / (S/B_0/scale + |G|^2)
                      = (B_0 + B_noise) / (B + B_noise)

    with B_0 the base global batch of the learning rate. Of 50 geometrically spaced batches the best one is chosen, if
    it promises 5 % more goodput, as in AdaptDL. Unlike AdaptDL it decides per window instead of per restart, smooths
    times, and may go below the initial batch.
    """

    name = "goodput"
    version = 4
    options: ClassVar[Options] = POLICY_OPTIONS["goodput"]

    def decide(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Decision:  # noqa: ARG002 - the protocol's arguments
        """The best candidate, if it is enough better than the current sizes. Without B_noise the batch stays."""
        state = unpack(_State, carry)
        noise = state.noise.observe(job_value(global_F, "noise_scale"))
        fit = StepTimeFit.of(state.fit, job)
        fit = fit.observe(
            job, window_of(job, obs_WF, global_F), jump=math.inf, smoothing=option(self.options, job, "smoothing")
        )
        sizes, model, noise_scale = decided_sizes(obs_WF), fit.model(job), noise.noise_scale
        proportional, tracking = option(self.options, job, "proportional") == 1, tracks(self.options, job)
        if model is not None and math.isnan(noise_scale) and proportional:
            sizes = by_speed(job, sum(sizes), model, sizes)
        elif model is not None and not math.isnan(noise_scale):
            scale, base = option(self.options, job, "noise_multiplier") * noise_scale, job.base_global_batch_size
            candidates = np.geomspace(max(model.smallest, 1.0), max(model.largest, 1.0), NUM_CANDIDATES)
            times_s = (model.balanced if proportional or tracking else model.equal)(candidates)
            values = goodput(candidates, times_s, scale, base)
            total = np.array([float(sum(sizes))])
            now_s = model.balanced(total) if tracking else np.array([model.of(sizes)])
            now = float(goodput(total, now_s, scale, base)[0])
            if float(values.max()) > (1 + option(self.options, job, "hysteresis")) * now:
                best = round(float(candidates[int(np.argmax(values))]))
                sizes = model.divide(best) if proportional else divided(job, best, np.ones(job.world_size))
        allocation = allocation_of(self.options, job, sizes)
        known = f"at a noise scale of {noise.noise_scale:.3g}"
        if model is None:
            reason = "no step was measured yet"
        elif math.isnan(noise.noise_scale):
            reason = "no noise scale is known yet"
        elif allocation.global_batch_size == sum(decided_sizes(obs_WF)):
            reason = f"no other batch promises enough more goodput {known}"
        else:
            reason = f"the greatest predicted goodput {known}"
        return Decision(allocation, carry=pack(_State(noise, fit.kept())), reason=reason)


def goodput(global_batch_sizes: Array64, step_times_s: Array64, noise_scale: float, base: int) -> Array64:
    """Samples per second, each counted by what it is worth beside one in a batch of `base` (AdaptDL, goodput.py)."""
    efficiency = (base + noise_scale) / (global_batch_sizes + noise_scale)
    return global_batch_sizes / np.maximum(step_times_s, 1e-12) * efficiency


LOSS_SMOOTHING = 0.2
"""Weight of the newest window in the average of the loss that is watched for stalls."""

MAX_DOUBLINGS = 30
"""More would leave every bound."""


class _Schedule(msgspec.Struct, array_like=True):
    """The progress of the schedule."""

    samples: float = 0.0
    """Samples since the last doubling."""
    num_doublings: int = 0
    loss: float = math.nan
    best_loss: float = math.inf
    num_stalled: int = 0
    """Windows since the averaged loss was last better than the best by `min_improvement`."""
    fit: StepTimeFit | None = None

    def observe(self, samples: float, loss: float, min_improvement: float) -> "_Schedule":
        seen = replace(self, samples=self.samples + (round(samples) if 0 < samples < math.inf else 0))
        if math.isnan(loss):
            return seen
        average = loss if math.isnan(self.loss) else (1 - LOSS_SMOOTHING) * self.loss + LOSS_SMOOTHING * loss
        if average < (1 - min_improvement) * self.best_loss:
            return replace(seen, loss=average, best_loss=average, num_stalled=0)
        return replace(seen, loss=average, num_stalled=self.num_stalled + 1)


class Doubling:
    """`doubling`: the initial batch, doubled repeatedly (Smith et al., arXiv 1711.00489).

    It doubles after a number of samples, as published schedules do, or when the training loss stalls.
    """

    name = "doubling"
    version = 4
    options: ClassVar[Options] = POLICY_OPTIONS["doubling"]

    def decide(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Decision:  # noqa: ARG002 - the protocol's arguments
        """The initial batch times a power of two. Samples are counted from the job's own totals."""
        schedule = unpack(_Schedule, carry)
        samples = job_value(global_F, "throughput") * job_value(global_F, "step_time_s") * steps_of(job, global_F)
        improvement = option(self.options, job, "min_improvement")
        schedule = schedule.observe(samples, job_value(global_F, "loss"), improvement)
        every = option(self.options, job, "every_samples")
        is_stalled = schedule.num_stalled >= option(self.options, job, "patience_windows")
        is_over = schedule.num_doublings >= option(self.options, job, "max_doublings")
        if not is_over and (schedule.samples >= every if every > 0 else is_stalled):
            schedule = replace(schedule, samples=0.0, num_doublings=schedule.num_doublings + 1, num_stalled=0)
        fit = StepTimeFit.of(schedule.fit, job).observe(job, window_of(job, obs_WF, global_F))
        carry = pack(replace(schedule, fit=fit.kept()))
        initial = job.initial_local_batch_sizes
        total = clamp_total(job, sum(initial) * 2 ** min(schedule.num_doublings, MAX_DOUBLINGS))
        sizes = scaled(job, total, initial)
        if option(self.options, job, "proportional") == 1:
            sizes = by_speed(job, total, fit.model(job), decided_sizes(obs_WF))
        reason = f"doubled {schedule.num_doublings} times; {schedule.num_stalled} windows without a lower loss"
        return Decision(allocation_of(self.options, job, sizes), carry=carry, reason=reason)


class Stigmergy:
    """`stigmergy`: agents on the nodes leave traces, and the ranks divide each step by them (docs/stigmergy.md).

    No arbitrator is needed: this policy decides nothing. With a fixed global batch only the division follows the
    traces.
    """

    name = STIGMERGY
    version = 2
    options: ClassVar[Options] = POLICY_OPTIONS[STIGMERGY]

    def decide(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Decision:  # noqa: ARG002 - the protocol's arguments
        """The sizes that the job began with, which rule until there are traces."""
        return Decision(
            Allocation(decided_sizes(obs_WF), "traces"),
            reason="nothing is decided: the traces of the nodes' agents rule",
        )
