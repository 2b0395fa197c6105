"""The memory of `rule`: its global batch, what it fitted, and in a job of a family what earlier runs taught. Pure."""

import math
import struct
from dataclasses import dataclass, field, replace

import numpy as np

from dynamix.schemas.messages import ArmRecord, ExploredArm, Job, JobProfile, NoisePoint
from dynamix.schemas.messages.profiles import MAX_PROFILE_BYTES

from .exchange_choice import is_decided, model_after
from .exchange_memory import DWELL, ExchangeMemory, packed_bytes
from .exploration import EXPLORATION_BYTES, Exploration
from .links import can_share
from .observation import PACKED_BYTES, Array32, NoiseMemory, steps_of
from .recurrence import RECURRENCE_BYTES, Recurrence, Standing
from .step_time_fit import StepTimeFit, Window
from .warm_fit import FitVerdict, WarmFit

MEMORY_FORMAT = 2
"""The version of the bytes in a profile; others are not used."""
MAX_MEMORY_BYTES = MAX_PROFILE_BYTES - 16 * 1024
"""No times of very many ranks are kept for the next run: the other half of a profile must have room as well."""

_GLOBAL_BATCH = struct.Struct("<d")
_MEMORY = struct.Struct("<III")


@dataclass(frozen=True)
class RuleMemory:
    """All that `rule` remembers."""

    global_batch_size: float
    """Its own, not rounded: a policy that scales its decisions does not feed back."""
    noise: NoiseMemory
    exchange: ExchangeMemory
    fits: WarmFit
    recurrence: Recurrence = field(default_factory=Recurrence)
    exploration: Exploration = field(default_factory=Exploration)

    def observe_times(self, job: Job, window: Window) -> "SeenWindow":
        """After one more window's times."""
        verdict = self.fits.observe(job, window, self.recurrence.times)
        exchange, exploration = self.exchange, self.exploration
        if verdict.trial.standing is Standing.DROPPED is not self.recurrence.times.standing:
            cold = ExchangeMemory.unpack(b"", job)
            exchange = replace(cold, ruling=exchange.ruling, age=exchange.age, shares=exchange.shares)
            exploration = exploration.without_records()
        kept = replace(
            self,
            fits=verdict.kept,
            recurrence=replace(self.recurrence, times=verdict.trial),
            exchange=exchange,
            exploration=exploration,
        )
        return SeenWindow(kept, self, verdict)

    def decided(self, global_batch_size: float, noise: NoiseMemory, exchange: ExchangeMemory) -> "RuleMemory":
        """After a decision."""
        return replace(self, global_batch_size=global_batch_size, noise=noise, exchange=exchange)

    def with_unknown_sync(self) -> "RuleMemory":
        """Where another way of exchanging begins to rule: the next window is no pair with this one."""
        fit, cold = self.fits
        fits = WarmFit(replace(fit, sync_s=math.nan), None if cold is None else replace(cold, sync_s=math.nan))
        return replace(self, fits=fits)

    def pack(self, job: Job) -> bytes:
        """Bytes for the carry; what only some jobs need is behind what all do."""
        fits = b"".join(each.pack() for each in self.fits if each is not None)
        packed = _GLOBAL_BATCH.pack(self.global_batch_size) + self.noise.pack() + fits
        if is_decided(job):
            packed += self.exchange.pack().ljust(_exchange_bytes(job), b"\0")
        if job.explores:
            packed += self.exploration.pack()
        return packed + self.recurrence.pack() if job.family else packed

    @classmethod
    def unpack(cls, carry: bytes, job: Job) -> "RuleMemory":
        """What `pack` gave; as a job begins from anything else."""
        exchange, recurrence, exploration = b"", b"", b""
        if job.family:
            carry, recurrence = carry[:-RECURRENCE_BYTES], carry[-RECURRENCE_BYTES:]
        if job.explores:
            carry, exploration = carry[:-EXPLORATION_BYTES], carry[-EXPLORATION_BYTES:]
        if is_decided(job):
            carry, exchange = carry[: -_exchange_bytes(job)], carry[-_exchange_bytes(job) :]
        head = _GLOBAL_BATCH.size
        noise, fits = carry[head : head + PACKED_BYTES], carry[head + PACKED_BYTES :]
        global_batch_size = _GLOBAL_BATCH.unpack_from(carry)[0] if len(carry) >= head else math.nan
        known = Recurrence.unpack(recurrence)
        return cls(
            global_batch_size if 0 < global_batch_size < math.inf else float(sum(job.initial_local_batch_sizes)),
            NoiseMemory.unpack(noise),
            ExchangeMemory.unpack(exchange, job),
            _unpacked_fits(fits, job, known),
            known,
            Exploration.unpack(exploration),
        )


@dataclass(frozen=True)
class SeenWindow:
    """The memory after a window, and what the window said of the profile that the job began with."""

    memory: RuleMemory
    before: RuleMemory
    verdict: FitVerdict

    @property
    def fit(self) -> StepTimeFit:
        """To decide by."""
        return self.verdict.ruling

    @property
    def disagrees(self) -> bool:
        """Whether decisions may not rest on what earlier runs showed of the exchange, for this window."""
        return self.verdict.trial.standing is Standing.ON_TRIAL and bool(self.verdict.disagreement)

    def observe_progress(self, global_F: Array32, job: Job) -> "SeenWindow":
        """After how the training went in the same window."""
        seen = self.memory.exploration.observe(global_F, steps_of(job, global_F), job.objective)
        return replace(self, memory=replace(self.memory, exploration=seen))

    @property
    def note(self) -> str:
        """For the log: that the profile, or its curve, is dropped or was accepted; empty in other windows."""
        was, now = self.before.recurrence, self.memory.recurrence
        found = []
        if now.times.standing is not was.times.standing:
            dropped = f"dropped its profile: {self.verdict.disagreement}"
            found.append(dropped if self.verdict.disagreement else "the first windows agree with its profile")
        if now.noise.standing is Standing.DROPPED is not was.noise.standing:
            expected = now.earlier.at(now.num_samples)
            found.append(f"dropped its noise scales: {expected:.3g} samples by now, another was measured")
        if self.memory.exploration.stopped and not self.before.exploration.stopped:
            found.append(f"stopped trying {self.before.exploration.arm.label}: too far behind earlier runs")
        if math.isnan(self.memory.exploration.cost) and not math.isnan(self.before.exploration.cost):
            found.append("a window's energy is unknown: with what this run spends from here on nothing is compared")
        return "; ".join(found)

    @property
    def remark(self) -> str:
        """For the reason of the decision."""
        if self.note:
            return f"; {self.note}"
        if self.disagrees:
            return f"; not by its profile: {self.verdict.disagreement}"
        remark = "; begins with its profile" if self.verdict.is_first else ""
        exploration = self.memory.exploration
        return remark + (f"; {exploration.arm.label}" if exploration.arm != ExploredArm() else "")

    def observe_noise(self, obs_WF: Array32, noise_scale: float) -> "SeenWindow":
        """After the noise scale of the same window."""
        recurrence = self.memory.recurrence.observe(obs_WF, noise_scale)
        return replace(self, memory=replace(self.memory, recurrence=recurrence))


def begun_with(job: Job, profile: JobProfile, policy: str) -> RuleMemory:
    """The memory of a job that begins with a profile: without its times, if the ranks or their bounds are others."""
    cold = RuleMemory.unpack(b"", job)
    fit, exchange = _known_times(job, profile, cold) if profile.policy == policy else (None, cold.exchange)
    recurrence = Recurrence.of_profile(profile, has_times=fit is not None, first_start=job.generation == 0)
    fits = cold.fits if fit is None else WarmFit(fit, cold.fits.fit)
    knows_arms = profile.policy == policy and profile.world_size == job.world_size
    exploration = Exploration.of_records(profile.arms_of(job.objective), job) if knows_arms else Exploration()
    return replace(cold, fits=fits, exchange=exchange, recurrence=recurrence, exploration=exploration)


def knowledge_of(job: Job, carry: bytes) -> tuple[bytes, tuple[NoisePoint, ...], ArmRecord | None, bool]:
    """What the run behind a carry taught: of times, of the noise scale by samples, and of what it tried out.

    Last, whether its cluster is another than that of the profile that it began with. A restarted run's curve begins
    amid a training: it is left out.
    """
    known = RuleMemory.unpack(carry, job)
    fit, curve = known.fits.fit, known.recurrence.own
    if known.recurrence.noise.standing.is_used:
        curve = curve.with_earlier(known.recurrence.earlier)
    memory = _MEMORY.pack(MEMORY_FORMAT, len(fit.pack()), max(job.max_local_batch_sizes)) + fit.pack()
    if is_decided(job):
        memory += known.exchange.pack()
    is_kept = len(memory) <= MAX_MEMORY_BYTES and fit.model(job) is not None
    tried = known.exploration.record if job.explores and job.generation == 0 else None
    is_changed = known.recurrence.times.standing is Standing.DROPPED
    return memory if is_kept else b"", curve.points if job.generation == 0 else (), tried, is_changed


def _known_times(job: Job, profile: JobProfile, cold: RuleMemory) -> tuple[StepTimeFit | None, ExchangeMemory]:
    memory = profile.memory
    if profile.world_size != job.world_size or len(memory) < _MEMORY.size:
        return None, cold.exchange
    version, num_fit_bytes, largest = _MEMORY.unpack_from(memory)
    if version != MEMORY_FORMAT or largest != max(job.max_local_batch_sizes):
        return None, cold.exchange
    fit = StepTimeFit.unpack(memory[_MEMORY.size :][:num_fit_bytes], job)
    model = fit.model(job)
    if model is None:
        return None, cold.exchange
    exchange, first = cold.exchange, cold.exchange.ruling[0]
    if is_decided(job):
        known = ExchangeMemory.unpack(memory[_MEMORY.size + num_fit_bytes :], job)
        if known.ruling[0] != first:
            model = model_after(known.ruling[0], first, model, known)
        exchange = replace(
            known,
            ruling=cold.exchange.ruling,
            shares=cold.exchange.shares,
            exposed_s=math.nan,
            age=DWELL,
            blocked=0,
            loss=math.nan,
            least_loss=math.nan,
        )
    unknown = np.full(job.world_size, math.nan)
    fit = replace(  # its first window is no pair with the other run's last one
        fit,
        samples_W=unknown,
        compute_W=unknown,
        barrier_s=math.nan,
        sync_s=math.nan,
        sync_intercept_s=model.sync_intercept_s,
        sync_slope=model.sync_slope,
    )
    return fit, exchange


def _unpacked_fits(packed: bytes, job: Job, known: Recurrence) -> WarmFit:
    if known.times.standing is not Standing.ON_TRIAL:
        return WarmFit(StepTimeFit.unpack(packed, job))
    half = len(packed) // 2
    return WarmFit(StepTimeFit.unpack(packed[:half], job), StepTimeFit.unpack(packed[half:], job))


def _exchange_bytes(job: Job) -> int:
    return packed_bytes(job.world_size if can_share(job) else 0)
