"""The policy `rule`."""

import math
from typing import ClassVar, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from dynamix.schemas.messages import MAX_PROFILE_BYTES, ArmRecord, Job, JobProfile
from dynamix.schemas.policies import POLICY_OPTIONS, RATE_EXPONENTS, Options, most_worthwhile

from .earlier_runs import EarlierRuns, SeenTimes, Standing
from .exchange import (
    OVER_OWNERS,
    ExchangeMemory,
    can_share,
    decided_exchange,
    exposed_time,
    is_decided,
    link_rates,
    model_after,
    slowest_in_words,
    way_of,
)
from .exploration import Exploration
from .policy import (
    Array32,
    Decision,
    NoiseMemory,
    allocation_of,
    decided_sizes,
    job_value,
    option,
    pack,
    steps_of,
    unpack,
)
from .sizing import Pace, by_speed, clamp_total
from .step_time import StepTime, StepTimeFit, best_global_batch, window_of

MAX_MEMORY_BYTES = MAX_PROFILE_BYTES - 16 * 1024
"""Most bytes of times in a profile, which must have room for its other half."""
_PACE = Pace()


class _State(msgspec.Struct, array_like=True):
    """The memory of `rule`; each advisor has its own part, which only some jobs need."""

    global_batch_size: float = 0.0
    """Its own, not rounded: a policy that scales its decisions does not feed back; 0 before the first decision."""
    noise: NoiseMemory = NoiseMemory()
    fit: StepTimeFit | None = None
    exchange: ExchangeMemory | None = None
    runs: EarlierRuns | None = None
    exploration: Exploration | None = None


class _Memory(msgspec.Struct, array_like=True):
    """A run's times and links in a profile."""

    largest: int = 0
    """Local batch size that the job's bounds allowed."""
    fit: StepTimeFit | None = None
    exchange: ExchangeMemory | None = None


class Knowledge(NamedTuple):
    """Lessons of a run, for the next one of its family."""

    memory: bytes
    """Times and links, in the policy's own bytes; empty when nothing was measured."""
    tried: ArmRecord | None = None
    """Result of this run and its trial; `None` without exploration or without a result."""
    is_changed: bool = False
    """Whether the cluster is another than that of the profile that it began with, as its first windows showed."""


class Rule:
    """`rule`: the global batch that buys the most progress per second, divided by the training processes.

        B = argmax lr(B)^rate_weight * B / (B + noise_multiplier * B_noise) / T(B)

    lr(B) is the job's learning-rate scaling: 1, B^0.5 or B. B_noise is the gradient noise scale. T(B) is the step-time
    model, fitted to each rank's times: a fixed time, a rate, and a size below which a batch costs no less. B is at most
    16 times B_noise, or 16 times the batch of the user's learning rate if that is larger. The defaults were found by
    hand on train scenarios. B changes once per window.

    The exchange is chosen by a law of measured times, as far as the job permits (docs/communication.md): local steps
    with `int8` where communication is more than 0.3 of a step, otherwise the way that takes least.

    A job of a family starts from what earlier runs learned (docs/recurring.md).
    """

    name = "rule"
    version = 9
    options: ClassVar[Options] = POLICY_OPTIONS["rule"]

    def decide(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Decision:  # noqa: ARG002 - the protocol's arguments
        """The next sizes. While B_noise was never known B stays, and without any measured time nothing changes."""
        state = unpack(_State, carry)
        memory, before = state.exchange or ExchangeMemory.of(job), state.runs or EarlierRuns()
        tried, noise, noise_scale = state.exploration or Exploration(), state.noise, job_value(global_F, "noise_scale")
        if memory.active[0].every == 1 or math.isfinite(noise_scale):  # not each round of local steps measures it
            noise = noise.observe(noise_scale)

        # what earlier runs taught, while the first windows agree with it
        seen = before.observe_times(job, StepTimeFit.of(state.fit, job), window_of(job, obs_WF, global_F))
        fit, exploration = seen.fit, tried
        runs = seen.runs
        if runs.standing is Standing.DROPPED is not before.standing:
            memory = replace(  # of another cluster only what was decided is known
                ExchangeMemory(), active=memory.active, age=memory.age, shares=memory.shares
            )
            exploration = tried = tried.without_records()
        disagrees = runs.standing is Standing.ON_TRIAL and bool(seen.disagreement)

        # what this run tries out
        if job.explores:
            exploration = tried.observe(global_F, steps_of(job, global_F))
        scale = noise.noise_scale * option(self.options, job, "noise_multiplier")

        # how gradients are exchanged
        current = state.global_batch_size or float(sum(job.initial_local_batch_sizes))
        model, measured = seen.deciding.model(job), memory.active[0]
        if is_decided(job):
            if not disagrees:
                memory = memory.observe(exposed_time(seen.deciding, model))
                memory = memory.with_links(link_rates(obs_WF)) if can_share(job) else memory
            max_every = int(option(self.options, job, "max_every"))
            memory, model = decided_exchange(job, memory, model, current, max_every=max_every)
        if memory.active[0] != measured:  # the next window's communication time is that of another exchange
            fit = replace(fit, sync_s=math.nan)
            runs = runs if runs.cold is None else replace(runs, cold=replace(runs.cold, sync_s=math.nan))

        # the global batch, and its division
        wanted, reason = self._next(job, current, model, scale)
        sizes = by_speed(job, clamp_total(job, wanted), model, decided_sizes(obs_WF))
        allocation = replace(allocation_of(self.options, job, sizes), rate_factor=exploration.rate_factor)
        if is_decided(job):
            if way_of(memory.newest) == OVER_OWNERS:
                reason += f"; {slowest_in_words(memory.rates.tolist())}"
            allocation = replace(allocation, exchange=memory.newest_with_shares)

        note = _note(before, runs, seen, tried, exploration)
        if note or disagrees:
            remarks = [note or f"not by its profile: {seen.disagreement}"]
        else:
            remarks = ["begins with its profile"] * seen.is_first + [exploration.label] * (
                exploration.rate_factor != 1.0
            )
        kept = _kept(job, _State(wanted, noise, fit, None, runs, exploration), memory)
        return Decision(allocation, carry=pack(kept), reason="; ".join((reason, *remarks)), note=note)

    def begin(self, job: Job, profile: JobProfile) -> bytes:
        """The carry of a generation that begins with a profile: without its times, if the ranks or their bounds differ.

        Its first window is no pair with the other run's last one.
        """
        fit, memory = None, ExchangeMemory.of(job)
        known = unpack(_Memory, profile.memory)
        is_of_these = profile.policy == self.name and profile.world_size == job.world_size
        if is_of_these and known.largest == max(job.max_local_batch_sizes):
            fit = StepTimeFit.of(known.fit, job)
            model = fit.model(job)
            if model is None:
                fit = None
            else:
                if is_decided(job):
                    theirs, first = known.exchange or memory, memory.active[0]
                    model = model_after(first, model, theirs, job.table_share)
                    memory = theirs.begun_again(memory)
                unknown = np.full(job.world_size, math.nan)
                fit = replace(
                    fit,
                    samples_W=unknown,
                    compute_W=unknown,
                    barrier_s=math.nan,
                    sync_s=math.nan,
                    sync_intercept_s=model.sync_intercept_s,
                    sync_slope=model.sync_slope,
                )
        runs = EarlierRuns(Standing.ABSENT if fit is None else Standing.ON_TRIAL)
        records = profile.arms if is_of_these else ()
        exploration = Exploration.of_records(records, is_restart=job.generation > 0)
        return pack(_kept(job, _State(noise=NoiseMemory(), fit=fit, runs=runs, exploration=exploration), memory))

    def knowledge(self, job: Job, carry: bytes) -> Knowledge:
        """Lessons of the run behind a carry; a restarted run, which begins in mid-training, has no result."""
        state = unpack(_State, carry)
        fit, runs = StepTimeFit.of(state.fit, job), state.runs or EarlierRuns()
        memory = pack(_Memory(max(job.max_local_batch_sizes), fit.kept(), state.exchange))
        is_kept = len(memory) <= MAX_MEMORY_BYTES and fit.model(job) is not None
        exploration = state.exploration or Exploration()
        return Knowledge(
            memory if is_kept else b"",
            exploration.record if job.explores and job.generation == 0 else None,
            runs.standing is Standing.DROPPED,
        )

    def _exponent(self, job: Job) -> float:
        return option(self.options, job, "rate_weight") * RATE_EXPONENTS[job.learning_rate_rule]

    def _next(self, job: Job, current: float, model: StepTime | None, noise_scale: float) -> tuple[float, str]:
        """The next global batch, and why."""
        if model is None or math.isnan(noise_scale):
            return current, f"no {'step' if model is None else 'noise scale'} is known yet: the global batch stays"
        most = most_worthwhile(noise_scale, job.base_global_batch_size)
        target = best_global_batch(model, noise_scale, self._exponent(job), most)
        pace = _PACE._replace(**{name: option(self.options, job, name) for name in ("max_change", "dead_band")})
        reason = f"{target:.0f} samples buy the most progress per second, at a noise scale of {noise_scale:.3g}"
        return pace.step(max(current, 1.0), target), reason


def _kept(job: Job, state: _State, memory: ExchangeMemory) -> _State:
    """The parts that this job needs."""
    return replace(
        state,
        fit=None if state.fit is None else state.fit.kept(),
        exchange=memory if is_decided(job) else None,
        runs=state.runs if job.family else None,
        exploration=state.exploration if job.explores else None,
    )


def _note(before: EarlierRuns, runs: EarlierRuns, seen: SeenTimes, tried: Exploration, now: Exploration) -> str:
    """Log message on a dropped or accepted profile and on stopped trials; empty in other windows."""
    found = []
    if runs.standing is not before.standing:
        dropped = f"dropped its profile: {seen.disagreement}"
        found.append(dropped if seen.disagreement else "the first windows agree with its profile")
    if now.stopped and not tried.stopped:
        found.append(f"stopped trying {tried.label}: too far behind earlier runs")
    return "; ".join(found)
