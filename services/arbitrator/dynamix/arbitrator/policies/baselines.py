"""Policies without a model of the step time: `static`, `proportional`, `split`, `random`, `stigmergy`."""

import hashlib
import math
from typing import ClassVar

import numpy as np

from dynamix.schemas.apportion import apportion
from dynamix.schemas.messages import Job
from dynamix.schemas.messages.allocation import EXCHANGE_CODECS, ROUTES, Allocation, exchange_of
from dynamix.schemas.messages.policies import STIGMERGY, STIGMERGY_OPTIONS
from dynamix.schemas.messages.policy_options import MOST_STEPS, OPTION_BOUNDS

from .model.step_time import filtered, window_of
from .policy import Array32, Array64, Decision, Option, Options, allocation_of, decided_sizes, named, option, track


class Static:
    """`static`: the sizes that the job started with. The baseline of every comparison.

    Its options set the gradient exchange from the first step on, as far as the job permits it (`attach(exchange=...)`),
    with or without a bus.
    """

    name = "static"
    version = 1
    options: ClassVar[Options] = {
        "track": track(0),
        "every": Option(1, 1, MOST_STEPS, "optimizer steps between two averagings; above 1 they are local", whole=True),
        "codec": named(EXCHANGE_CODECS, "how gradients are encoded; an extension's codec by its name"),
        "route": named(ROUTES, "how they are summed"),
        "outer_rate": Option(1, 0.001, 10, "after local steps: how far all go, over the way to their mean"),
        "outer_momentum": Option(0, 0, 0.999, "after local steps: Nesterov momentum of these ways"),
    }

    def decide(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Decision:  # noqa: ARG002 - the protocol's arguments
        """The job's initial sizes."""
        exchange = exchange_of(job.policy_options)
        allocation = allocation_of(self.options, job, job.initial_local_batch_sizes, exchange)
        return Decision(allocation, reason="the sizes that the job began with")


class Proportional:
    """`proportional`: the job's global batch, divided in proportion to each rank's measured throughput.

    It helps with slow processors only: a slow link carries the same gradient whatever the sizes are.
    """

    name = "proportional"
    version = 1
    options: ClassVar[Options] = {
        "smoothing": Option(0.5, 0.01, 1, "weight of the newest throughput in the moving average"),
        "dead_band": Option(0.03, 0, 1, "share by which a new split must shorten the predicted step"),
        "track": track(0),
    }

    def decide(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Decision:  # noqa: ARG002 - the protocol's arguments
        """A split in proportion to smoothed throughput; the last decision while it is nearly as good.

        A rank that was never measured keeps its size, and the others share what is left of the global batch.
        """
        current = decided_sizes(obs_WF)
        smoothing = option(self.options, job, "smoothing")
        measured = window_of(job, obs_WF, global_F)  # NaN for a stale row and for a rank that had no samples
        previous = _unpack(carry, job.world_size)
        smoothed = filtered(previous, measured.samples_W / measured.compute_W, math.inf, smoothing)
        proposed = _split(job, current, smoothed)
        gain = 1 - _step_time_s(proposed, smoothed) / max(_step_time_s(current, smoothed), 1e-12)
        settled = sum(current) == sum(proposed) and gain <= option(self.options, job, "dead_band")
        sizes = current if settled else proposed
        allocation = allocation_of(self.options, job, sizes)
        return Decision(
            allocation,
            carry=smoothed.astype("<f4").tobytes(),
            reason=_reason(allocation, gain, settled=settled, measured=not np.isnan(smoothed).all()),
        )


def _reason(allocation: Allocation, gain: float, *, settled: bool, measured: bool) -> str:
    if allocation.split == "tracking":
        return f"the ranks divide {allocation.global_batch_size} samples by their speed after every step"
    if not measured:
        return "no rank's speed is known yet"
    if settled:
        return f"another split would make computing {max(gain, 0.0):.1%} shorter, which is too little"
    return f"divided by measured speed: computing gets {gain:.1%} shorter"


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
    """Compute time of the slowest rank known: what a step cannot be shorter than; 0 when none is."""
    known = ~np.isnan(throughput)
    return float(np.max(np.asarray(sizes, dtype=np.float64)[known] / throughput[known], initial=0.0))


def _unpack(carry: bytes, world_size: int) -> Array64:
    if len(carry) != 4 * world_size:
        return np.full(world_size, np.nan)
    throughput = np.frombuffer(carry, dtype="<f4").astype(np.float64)
    return np.where((throughput > 0) & np.isfinite(throughput), throughput, np.nan)


class Split(Proportional):
    """`split`: the job's global batch as the script chose it, divided by measured speed. The default.

    The training processes divide it after every step (the fast loop). Where they cannot, because gradients carry no
    times, this policy divides it once per window as `proportional` does. Samples per step, steps per epoch and learning
    rate are those of plain data-parallel training.
    """

    name = "split"
    options: ClassVar[Options] = {**Proportional.options, "track": track(1)}


DELTAS = (-100, -25, 0, 25, 100)
"""The published action set in samples (method section 2), in the order in which it is drawn from."""


class Random:
    """`random`: a published delta action per rank, drawn uniformly. A baseline for learned policies."""

    name = "random"
    version = 1
    options: ClassVar[Options] = {"track": track(0)}

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


_MEANINGS = {
    "evaporation": "share of a trace's strength that is lost per window, and weight of what is new",
    "diffusion": "share of an appetite that comes from the cells beside it",
    "noise_multiplier": "factor on B_noise: above 1, larger batches count for more",
    "rate_weight": "power of the learning rate in the worth of a step",
    "max_change": "greatest factor between the global batch in force and an appetite",
    "dead_band": "relative distance from the mean appetite at which the global batch stays",
    "learned": "1: a network chooses a factor on each agent's wish; 0: the wish is the rule's",
}


class Stigmergy:
    """`stigmergy`: agents on the nodes leave traces, and the ranks divide each step by them (docs/stigmergy.md).

    No arbitrator is needed: this policy decides nothing. With a fixed global batch only the division follows the
    traces.
    """

    name = STIGMERGY
    version = 2
    options: ClassVar[Options] = {
        name: Option(STIGMERGY_OPTIONS[name], bounds.low, bounds.high, _MEANINGS[name], whole=bounds.whole)
        for name, bounds in OPTION_BOUNDS[STIGMERGY].items()
    }

    def decide(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Decision:  # noqa: ARG002 - the protocol's arguments
        """The sizes that the job began with, which rule until there are traces."""
        return Decision(
            Allocation(decided_sizes(obs_WF), "traces"),
            reason="nothing is decided: the traces of the nodes' agents rule",
        )
