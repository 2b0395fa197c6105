"""The policy `rule`, and what it learns of earlier runs of a job's family. Pure.

A profile is what a run taught, made of its last action, whose carry is all that its policy knows. The next job of the
family begins with it, and its first action holds it, so that nothing else is needed to decide it again.
"""

import enum
import math
import re
from collections.abc import Sequence
from itertools import zip_longest
from typing import ClassVar, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from dynamix.schemas.messages import MAX_ARMS, MAX_PROFILE_BYTES, Action, ArmRecord, Job, JobProfile
from dynamix.schemas.policies import POLICY_OPTIONS, Options

from .exchange import (
    LAG,
    OVER_OWNERS,
    ExchangeMemory,
    can_share,
    decided_exchange,
    is_decided,
    link_rates,
    model_after,
    way_of,
)
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
    unpack,
)
from .step_time import StepTime, StepTimeFit, Window, best_global_batch, by_speed, clamp_total, towards, window_of

SETTLED = 2
"""Windows that settle it, one way or the other."""
TOLERANCE = 1.3
"""Factor between a measured and an expected time within which a window agrees. Where processors are shared the times
of one window are a tenth to a fifth off."""


class Standing(enum.IntEnum):
    """Whether a profile is on trial, accepted or dropped."""

    ABSENT = 0
    ON_TRIAL = 1
    ACCEPTED = 2
    DROPPED = 3


class EarlierRuns(msgspec.Struct, frozen=True, array_like=True):
    """The trial of what earlier runs learned.

    A profile is on trial until two windows agreed with it, or two did not; that takes three windows at most. A window
    agrees when its steps took as long as the profile says for its sizes, and so did the median rank's computing. Where
    one rank of many has another speed than before, the fit believes its new times by itself, and what is fixed stays
    known. In a window that does not agree, and from the second one on, everything is decided as without a profile.
    """

    standing: Standing = Standing.ABSENT
    """Standing of the times of earlier runs."""
    num_agreeing: int = 0
    num_off: int = 0
    cold: StepTimeFit | None = None
    """The fit to this run's windows only, while the times of earlier runs are on trial."""

    def observe_times(self, job: Job, fit: StepTimeFit, window: Window) -> "SeenTimes":
        """After one more window: a fit that began with that of an earlier run, or one of this run alone."""
        if self.standing is not Standing.ON_TRIAL:
            fit = fit.observe(job, window)
            return SeenTimes(self, fit, fit)
        cold, model = StepTimeFit.of(self.cold, job).observe(job, window), fit.model(job)
        if cold.model(job) is None or model is None:  # nothing was measured: nothing is known of this cluster
            return SeenTimes(replace(self, cold=cold), fit, cold)
        off = disagreement(model, window)
        num_agreeing, num_off = self.num_agreeing + (not off), self.num_off + bool(off)
        standing = Standing.ACCEPTED if num_agreeing >= SETTLED else Standing.ON_TRIAL
        standing = Standing.DROPPED if num_off >= SETTLED else standing
        runs = replace(self, standing=standing, num_agreeing=num_agreeing, num_off=num_off)
        warm = fit if off else fit.observe(job, window)
        deciding = cold if off else warm
        if standing is Standing.ON_TRIAL:
            return SeenTimes(replace(runs, cold=cold), warm, deciding, off)
        return SeenTimes(replace(runs, cold=None), deciding, deciding, off)


class SeenTimes(NamedTuple):
    """The times measured in a window."""

    runs: EarlierRuns
    fit: StepTimeFit
    """To keep."""
    deciding: StepTimeFit
    """To decide by now."""
    disagreement: str = ""
    """Contradiction between the window and the profile, in words; empty if there is none."""


def disagreement(model: StepTime, window: Window) -> str:
    """Contradiction between a window and a model, in words; empty if there is none."""
    known = np.isfinite(window.compute_W) & np.isfinite(window.samples_W)
    if not known.any():
        return ""
    expected_W = model.compute_s(np.where(known, window.samples_W, 0.0))[known]
    measured_W = window.compute_W[known]
    computing = float(np.exp(np.median(np.log(measured_W / expected_W))))
    if not 1.0 / TOLERANCE <= computing <= TOLERANCE:
        return f"computing takes {computing:.2g} of its time"
    if math.isnan(window.sync_s) or math.isnan(window.rest_s):
        return ""
    barrier_s = measured_W.max(keepdims=True)  # a rank of another speed than before is no disagreement
    expected_s = float(model.step_time_s(barrier_s)[0])
    measured_s = float(barrier_s[0]) + window.sync_s + window.rest_s
    if not 1.0 / TOLERANCE <= measured_s / expected_s <= TOLERANCE:
        return f"a step takes {measured_s:.3g} s, not {expected_s:.3g} s"
    return ""


NUM_LEVELS = 64
LEVEL = 2.0**-0.125
"""Factor between two levels of the held-out error: 8.3 %, down to 1/256."""
NUM_COMPARED = 8
MOST_EXPLORING = 2
WORTH = 0.93
"""An arm is better at this share of the first one's time or less: equal runs differ by a seventh between seeds."""
TOO_SLOW = 1.25
MAX_SHORT = 4
MIN_TRIAL_WINDOWS = 6
"""Windows before which no run is stopped: a decision takes effect two windows later, and shows after some more."""
ACCURACY_SMOOTHING = 0.5
"""Weight of the newest held-out accuracy."""
RATE_STEP = 1.5
FIRST_ARM = 1.0
"""The arm of the first run: the script's own learning rate."""


class Exploration(msgspec.Struct, frozen=True, array_like=True):
    """The arm that this run tries out, and its progress: a small bandit over factors on the learning rate.

    Runs are compared by the times at which the held-out error first fell below levels of a fixed row: the mean
    logarithm of their ratios over the last `NUM_COMPARED` levels that both reached. An arm that ended more than
    `MAX_SHORT` levels short of the first one is no better, however fast it was. At most `MOST_EXPLORING` arms are tried
    besides that of the first run: further in the direction of one that was better, away from one that was not (the
    pruning of Zeus over batch sizes, arXiv 2208.06102). Afterwards the best arm is taken. A run that takes `TOO_SLOW`
    times as long to a level as the best arm so far goes back to it: Zeus's early stop.
    """

    tried: float = FIRST_ARM
    """The trial with which the run began."""
    best: float = FIRST_ARM
    """To go back to."""
    reference: Array64 = msgspec.field(default_factory=lambda: np.zeros(NUM_LEVELS))
    """Milestones of the best arm so far; 0 where unknown."""
    own: Array64 = msgspec.field(default_factory=lambda: np.zeros(NUM_LEVELS))
    time_s: float = 0.0
    """Time of training so far."""
    accuracy: float = math.nan
    """On held-out data, smoothed."""
    num_windows: int = 0
    stopped: bool = False
    """Whether the arm that it began with was given up; its milestones end there."""

    @classmethod
    def of_records(cls, records: Sequence[ArmRecord], *, is_restart: bool) -> "Exploration":
        """State at the beginning of a run. A restarted run tries nothing: its time would count for no arm."""
        best = _best(records)
        known = _record_of(best, records)
        reference = np.zeros(NUM_LEVELS) if known is None else _levels(known)
        return cls(tried=best if is_restart else next_arm(records), best=best, reference=reference)

    @property
    def rate_factor(self) -> float:
        """The factor on the learning rate that is in effect."""
        return self.best if self.stopped else self.tried

    @property
    def label(self) -> str:
        """Description of the factor for people."""
        return f"learning rate x {self.rate_factor:.3g}"

    @property
    def record(self) -> ArmRecord | None:
        """Result of the run; `None` if it is unknown."""
        if not self.own.any():
            return None
        milestones = tuple(round(time_s, 3) for time_s in self.own.tolist())
        return ArmRecord(self.tried, 1, int(self.stopped), milestones)

    def observe(self, global_F: Array32, num_steps: int) -> "Exploration":
        """After one more window."""
        step_s, accuracy = job_value(global_F, "step_time_s"), job_value(global_F, "held_out_accuracy")
        if self.stopped or not 0.0 < step_s < math.inf:
            return self
        time_s, smoothed, own = self.time_s + step_s * num_steps, self.accuracy, self.own
        if math.isfinite(accuracy):
            smoothed = accuracy if math.isnan(smoothed) else smoothed + ACCURACY_SMOOTHING * (accuracy - smoothed)
            error = max(1.0 - smoothed, LEVEL**NUM_LEVELS)
            num_levels = math.floor(math.log(error) / math.log(LEVEL) + 1e-9) if error < 1.0 else 0
            reached = np.arange(NUM_LEVELS) < num_levels
            own = np.where(reached & (own == 0.0), time_s, own)
        missing = np.flatnonzero((own == 0.0) & (self.reference > 0.0))
        may_stop = self.tried != self.best and self.num_windows >= MIN_TRIAL_WINDOWS and missing.size > 0
        stopped = may_stop and time_s > TOO_SLOW * float(self.reference[missing[0]])
        known = replace(self, time_s=time_s, accuracy=smoothed, own=own, stopped=stopped)
        return replace(known, num_windows=self.num_windows + 1)


def next_arm(records: Sequence[ArmRecord]) -> float:
    """The arm of the next run, or the best arm when enough was tried."""
    first = _record_of(FIRST_ARM, records)
    if first is None or not any(first.milestones):
        return FIRST_ARM
    tried = [record for record in records if record.rate_factor != FIRST_ARM]
    if not tried:
        return RATE_STEP
    if len(tried) >= MOST_EXPLORING:
        return _best(records)
    newest = tried[-1]
    was_better = not newest.num_stopped and score(newest, first) <= WORTH
    return newest.rate_factor * RATE_STEP if was_better else 1.0 / RATE_STEP


def score(record: ArmRecord, first: ArmRecord) -> float:
    """The time of an arm over that of the first; NaN where they have nothing in common, or the arm ended early."""
    ours, theirs = _levels(record), _levels(first)
    last, first_last = (int(np.flatnonzero(levels).max(initial=-1)) for levels in (ours, theirs))
    if first_last - last > MAX_SHORT:
        return math.nan
    both = np.flatnonzero((ours > 0.0) & (theirs > 0.0))[-NUM_COMPARED:]
    return float(np.exp(np.log(ours[both] / theirs[both]).mean())) if both.size else math.nan


def _record_of(arm: float, records: Sequence[ArmRecord]) -> ArmRecord | None:
    return next((record for record in records if record.rate_factor == arm), None)


def _best(records: Sequence[ArmRecord]) -> float:
    """The arm that took least; the first one where none is clearly better. Those that were stopped do not count."""
    first = _record_of(FIRST_ARM, records)
    if first is None:
        return FIRST_ARM
    kept = [record for record in records if 2 * record.num_stopped < record.num_runs]
    good = [(value, record.rate_factor) for record in kept if (value := score(record, first)) <= WORTH]
    return min(good, default=(WORTH, FIRST_ARM))[1]


def _levels(record: ArmRecord) -> Array64:
    levels = np.zeros(NUM_LEVELS)
    known = record.milestones[:NUM_LEVELS]
    levels[: len(known)] = known
    return levels


MIN_PROFILE_WINDOWS = 5
"""Runs with fewer decided windows teach nothing."""

COMPLETED, LEFT = "completed", "left"
STOPPED, TIMEOUT, ERROR = "stopped", "timeout", "error"
ENDS = (COMPLETED, LEFT, STOPPED, TIMEOUT, ERROR)
_STOPPED = ("KeyboardInterrupt", "SignalException")
_TIMED_OUT = re.compile(r"\btim(ed|e)[ -]?out\b", re.IGNORECASE)
"""gloo: `Timed out waiting 1800000ms for recv operation`; NCCL: `Watchdog caught collective operation timeout`."""


def class_of_end(reason: str) -> str:
    """The class in `ENDS` of a `Job.end_reason`."""
    if reason in {COMPLETED, LEFT}:
        return reason
    if reason.startswith(_STOPPED):
        return STOPPED
    return TIMEOUT if _TIMED_OUT.search(reason) else ERROR


def judged(newest: ArmRecord | None, end_reason: str) -> ArmRecord | None:
    """The result of a run's arm, by how it ended; `None` for no result.

    One that somebody stopped, or that waited in vain for a rank, might have gone either way. One that failed counts
    against its arm, which may be why, and says nothing of a run without one.
    """
    end = class_of_end(end_reason) if end_reason else COMPLETED  # virtual runs give none
    if newest is None or end in {COMPLETED, LEFT}:
        return newest
    return replace(newest, num_stopped=1) if end == ERROR and newest.rate_factor != 1.0 else None


def with_record(records: tuple[ArmRecord, ...], newest: ArmRecord | None) -> tuple[ArmRecord, ...]:
    """The records after one more run: each milestone has the mean time of the runs that reached it."""
    if newest is None:
        return records
    known = _record_of(newest.rate_factor, records)
    if known is None:
        return (*records, newest)[:MAX_ARMS]
    count, means = known.num_runs, []
    for before, now in zip_longest(known.milestones, newest.milestones, fillvalue=0.0):
        means.append((count * before + now) / (count + 1) if before and now else before or now)
    merged = ArmRecord(known.rate_factor, count + 1, known.num_stopped + newest.num_stopped, tuple(means))
    return tuple(merged if record is known else record for record in records)


MAX_MEMORY_BYTES = MAX_PROFILE_BYTES - 16 * 1024
"""Most bytes of times in a profile, which must have room for its other half."""


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


class Rule:
    """`rule`: the global batch that buys the most progress per second, divided by the training processes.

        B = argmax min(n(B) / n(B_0), lr(B) / lr(B_0)) / T(B)
        n(B) = lr(B)^rate_weight * B / (B + noise_multiplier * B_noise)

    lr(B) is the job's learning-rate scaling: 1 (which then does not count), B^0.5 or B. B_0 is the script's batch: B
    leaves it where that gains more than the noise of times, whether noise or stride limits a step. B_noise is the
    gradient noise scale. T(B) is the step-time model, fitted to each rank's times: a fixed time, a rate, a size below
    which a batch costs no less; and to how long ranks wait where speeds change. B is at most 16 times B_noise or B_0.
    Defaults were found by hand on train scenarios. B changes once per window.

    The exchange is chosen by a law of measured times, as far as the job permits (docs/communication.md): local steps
    with `int8` where communication is more than 0.3 of a step, otherwise the way that takes least.

    A job of a family starts from what earlier runs learned (docs/recurring.md).
    """

    name = "rule"
    version = 14
    options: ClassVar[Options] = POLICY_OPTIONS["rule"]

    def decide(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Decision:
        """The next sizes. While B_noise was never known B stays, and without any measured time nothing changes."""
        state = unpack(_State, carry)
        memory, before = state.exchange or ExchangeMemory.of(job), state.runs or EarlierRuns()
        tried, noise, noise_scale = state.exploration or Exploration(), state.noise, job_value(global_F, "noise_scale")
        if memory.active[0].every == 1 or math.isfinite(noise_scale):  # not each round of local steps measures it
            noise = noise.observe(noise_scale)

        # what earlier runs taught, while the first windows agree with it
        times, began = window_of(job, obs_WF, global_F), window == 0 and job.exact_exposed_s is not None
        times = times._replace(sync_s=math.nan, waited_s=math.nan) if began else times  # steps of two exchanges
        seen = before.observe_times(job, StepTimeFit.of(state.fit, job), times)
        fit, exploration = seen.fit, tried
        runs = seen.runs
        if runs.standing is Standing.DROPPED is not before.standing:
            memory = ExchangeMemory(memory.active, age=memory.age)  # of another cluster only what was decided is known
            # nothing is tried there; the first windows had the arm that it began with, but count as a first run's
            none = np.zeros(NUM_LEVELS)
            exploration = tried = replace(tried, tried=FIRST_ARM, best=FIRST_ARM, reference=none, stopped=False)
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
                memory = memory.observe(times.sync_s, steps_of(job, global_F))
                memory = memory.with_links(link_rates(obs_WF)) if can_share(job) else memory
            memory, model = decided_exchange(job, memory, model, current)
        if memory.active[0] != measured:  # the next window's communication time is that of another exchange
            fit = replace(fit, sync_s=math.nan)
            runs = runs if runs.cold is None else replace(runs, cold=replace(runs.cold, sync_s=math.nan))

        # the global batch, and its division
        wanted, reason = self._next(job, current, model, scale)
        sizes = by_speed(job, clamp_total(job, wanted), model, decided_sizes(obs_WF))
        allocation = replace(allocation_of(self.options, job, sizes), rate_factor=exploration.rate_factor)
        if is_decided(job):
            if way_of(memory.newest) == OVER_OWNERS and len(memory.rates):
                reason += f"; the link of rank {memory.rates.argmin()} carries least: owners with shares relieve it"
            allocation = replace(allocation, exchange=memory.newest)

        note = _note(before, runs, seen, tried, exploration)
        if note or disagrees:
            remarks = [note or f"not by its profile: {seen.disagreement}"]
        else:
            trial = [exploration.label] * (exploration.rate_factor != 1.0)
            remarks = ["begins with its profile"] * (before.num_agreeing == 0 < runs.num_agreeing) + trial
        kept = _kept(job, _State(wanted, noise, fit, None, runs, exploration), memory)
        return Decision(allocation, carry=pack(kept), reason="; ".join((reason, *remarks)), note=note)

    def begin(self, job: Job, profile: JobProfile) -> bytes:
        """The carry of a generation that begins with a profile: without its times, if the ranks or their bounds differ.

        Its first window is no pair with the other run's last one.
        """
        fit, model, memory = None, None, ExchangeMemory.of(job)
        known = unpack(_Memory, profile.memory)
        is_of_these = profile.policy == self.name and profile.world_size == job.world_size
        if is_of_these and known.largest == max(job.max_local_batch_sizes):
            fit = StepTimeFit.of(known.fit, job)
            model = fit.model(job)
        if model is not None and is_decided(job):
            theirs, first = known.exchange or memory, memory.active[0]
            model = model_after(first, model, theirs, job.table_share)
            memory = replace(theirs, active=memory.active, age=LAG)
        if fit is not None and model is not None:
            unknown, slope = np.full(job.world_size, math.nan), model.sync_slope
            fit = replace(fit, samples_W=unknown, compute_W=unknown, barrier_s=math.nan, sync_s=math.nan)
            fit = replace(fit, sync_intercept_s=model.sync_intercept_s, sync_slope=slope)
        runs = EarlierRuns(Standing.ABSENT if model is None else Standing.ON_TRIAL)
        records = profile.arms if is_of_these else ()
        exploration = Exploration.of_records(records, is_restart=job.generation > 0)
        return pack(_kept(job, _State(fit=None if model is None else fit, runs=runs, exploration=exploration), memory))

    def profile_after(
        self, job: Job, last: Action, earlier: JobProfile | None, *, ended_sequence: int = 0
    ) -> JobProfile | None:
        """The family's profile after a run with this last action; `None` if the run has nothing to store.

        What the run could not measure is kept of the earlier profile. A restarted run, which begins in mid-training,
        has no result of what it tried.
        """
        if last.window + 1 < MIN_PROFILE_WINDOWS:
            return None
        state = unpack(_State, last.carry)
        fit, runs = StepTimeFit.of(state.fit, job), state.runs or EarlierRuns()
        memory = pack(_Memory(max(job.max_local_batch_sizes), fit.kept(), state.exchange))
        if len(memory) > MAX_MEMORY_BYTES or fit.model(job) is None:
            memory = b""
        result = (state.exploration or Exploration()).record if job.explores and job.generation == 0 else None
        if not memory and result is None:
            return None
        known = earlier if earlier is not None and earlier.policy == self.name else None
        is_again = earlier is not None and earlier.job == job.job  # a restarted run has ended once more
        has_times = bool(memory) or known is None
        # Runs on another cluster took other times: none of them says anything of an arm on this one.
        is_changed = runs.standing is Standing.DROPPED
        is_other = known is None or is_changed or known.world_size != job.world_size
        arms = () if known is None or is_other else known.arms
        tried = None if is_again else judged(result, job.end_reason)
        return JobProfile(
            family=job.family,
            run=1 if earlier is None else earlier.run + (not is_again),
            job=job.job,
            generation=job.generation,
            ended_sequence=ended_sequence,
            policy=self.name,
            policy_version=self.version,
            world_size=job.world_size if has_times or known is None else known.world_size,
            num_windows=last.window + 1,
            allocation=replace(last.allocation, rate_factor=1.0),
            memory=memory if has_times or known is None else known.memory,
            arms=with_record(arms, tried),
        )

    def _next(self, job: Job, current: float, model: StepTime | None, noise_scale: float) -> tuple[float, str]:
        """The next global batch, and why."""
        if model is None or math.isnan(noise_scale):
            return current, f"no {'step' if model is None else 'noise scale'} is known yet: the global batch stays"
        target = best_global_batch(job, model, noise_scale, option(self.options, job, "rate_weight"))
        pace = {name: option(self.options, job, name) for name in ("max_change", "dead_band")}
        reason = f"{target:.0f} samples buy the most progress per second, at a noise scale of {noise_scale:.3g}"
        return towards(target, max(current, 1.0), **pace), reason


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
