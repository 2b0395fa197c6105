"""`rule`: the global batch that buys the most progress per second, divided among the ranks by the training processes.

    B = argmax lr(B)^rate_weight * B / (B + noise_multiplier * B_noise) / T(B)

lr(B) is the job's learning-rate scaling: 1, B^0.5 or B. B_noise is the gradient noise scale. T(B) is the step-time
model: for each rank a fixed time, a rate, and a size below which a batch costs no less, fitted to its own times. A step
is worth no more above 16 times B_noise, or 16 times the batch of the user's learning rate where that is more. The
defaults were found by hand on train scenarios. B moves once per window; the division follows every step where the job
supports tracking, otherwise this policy divides by the model.

The exchange is chosen with B, as far as the job permits: codec and period of local steps of the greatest progress per
second, by what they saved while they were active and by how far the ranks drift apart; `rows` for embedding tables and,
where one link is slower than others, the route `shares` also in exact jobs.

A job of a family starts from what earlier runs taught (docs/recurring.md).
"""

import math
from typing import ClassVar

from msgspec.structs import replace

from dynamix.schemas.messages import Job, JobProfile
from dynamix.schemas.messages.allocation import Exchange
from dynamix.schemas.messages.policies import RATE_EXPONENTS
from dynamix.schemas.progress import most_worthwhile, progress

from .model.exchange_choice import choose, exposure_of, is_decided, model_after
from .model.exchange_memory import OVER_OWNERS, ExchangeMemory, way_of
from .model.levers import AS_RULE, Lever, Wish, changed_exchange
from .model.links import can_share, link_rates, slowest_in_words
from .model.observation import Array32, decided_sizes, job_value
from .model.rule_memory import RuleMemory, begun_with, knowledge_of
from .model.step_time import StepTime, best_global_batch
from .model.step_time_fit import window_of
from .options import Option, Options, allocation_of, option, track
from .policy import Decision, Knowledge
from .sizing import Pace, by_speed, clamp_total

_PACE = Pace()


class Rule:
    """Sets the global batch; B may go below the initial one as well as above it."""

    name = "rule"
    version = 8
    options: ClassVar[Options] = {
        "noise_multiplier": Option(1.0, 0.01, 100, "factor on B_noise: above 1, larger batches count for more"),
        "rate_weight": Option(0.5, 0, 1, "power of the learning rate in the worth of a step"),
        "max_change": Option(_PACE.max_change, 1.01, 100, "greatest factor between two decisions"),
        "dead_band": Option(_PACE.dead_band, 0, 1, "relative distance from the best batch at which B stays"),
        "max_every": Option(16, 1, 16, "most steps between two averagings, for jobs that permit them", whole=True),
        "track": track(1),
    }

    def decide(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Decision:  # noqa: ARG002 - the protocol's arguments
        """The next sizes. While B_noise was never known B stays, and without any measured time nothing changes."""
        return self.steered(job, obs_WF, global_F, carry)[0]

    def steered(
        self,
        job: Job,
        obs_WF: Array32,
        global_F: Array32,
        carry: bytes,
        *,
        lever: Lever = AS_RULE,
        wish: Wish | None = None,
    ) -> tuple[Decision, Wish | None]:
        """The decision with a lever on it, and what the rule itself wished; `wish` is that of the last decision.

        It is `None` where the job's gradients can travel in one way only.
        """
        known = RuleMemory.unpack(carry, job)
        noise, memory, noise_scale = known.noise, known.exchange, job_value(global_F, "noise_scale")
        if memory.ruling[0].every == 1 or math.isfinite(noise_scale):  # not each round of local steps measures it
            noise = noise.observe(noise_scale)
        seen = known.observe_times(job, window_of(job, obs_WF, global_F)).observe_noise(obs_WF, noise_scale)
        if job.explores:
            seen = seen.observe_progress(global_F, job)
        fit, known = seen.fit, seen.memory
        model = fit.model(job)
        arm = known.exploration.arm
        scale = known.recurrence.noise_scale(noise.noise_scale) * option(self.options, job, "noise_multiplier")
        scale *= arm.noise_multiplier
        if is_decided(job):
            memory = known.exchange
            if not seen.disagrees:
                loss, drift = job_value(global_F, "loss"), job_value(global_F, "local_drift")
                memory = memory.observe(exposure_of(fit, model, obs_WF), loss, drift, job.world_size)
                memory = memory.with_links(link_rates(obs_WF)) if can_share(job) else memory
            permitting = replace(job, exchange="exact") if arm.exact else job
            own = memory if wish is None else wish.seen_in(memory)
            wished, ruled = self._exchange(permitting, model, own, scale), memory.ruling[0]
            wish = Wish(wished, own.age if wished == own.newest else 0)
            max_every = int(option(self.options, job, "max_every"))
            knows_times = model is not None and math.isfinite(memory.exact_s)
            chosen = changed_exchange(lever, wished, permitting, memory, knows_times=knows_times, max_every=max_every)
            if model is not None:
                model = model_after(ruled, chosen, model, memory)
            memory = memory.decided(chosen)
            if memory.ruling[0] != ruled:  # what the next window exposes is no pair with what this one did
                known = known.with_unknown_sync()
        wanted, reason = self._next(job, known.global_batch_size, model, scale * lever.noise)
        sizes = by_speed(job, clamp_total(job, wanted), model, decided_sizes(obs_WF))
        allocation = allocation_of(self.options, job, sizes)
        if is_decided(job):
            if way_of(memory.newest) == OVER_OWNERS:
                reason += f"; {slowest_in_words(memory.rates)}"
            allocation = replace(allocation, exchange=memory.newest_with_shares)
        if arm.rate_factor != 1.0:
            allocation = replace(allocation, rate_factor=arm.rate_factor)
        packed = known.decided(wanted, noise, memory).pack(job)
        return Decision(allocation, carry=packed, reason=reason + seen.remark, note=seen.note), wish

    def begin(self, job: Job, profile: JobProfile) -> bytes:
        """The carry of a generation that begins with a profile."""
        return begun_with(job, profile, self.name).pack(job)

    def knowledge(self, job: Job, carry: bytes) -> Knowledge:
        """What the run behind a carry taught."""
        return Knowledge(*knowledge_of(job, carry))

    def _exchange(self, job: Job, model: StepTime | None, memory: ExchangeMemory, noise_scale: float) -> Exchange:
        """The way that is decided now; that of the last decision before anything is known."""
        if model is None or math.isnan(noise_scale):
            return memory.newest
        exponent, most = self._exponent(job), most_worthwhile(noise_scale, job.base_global_batch_size)
        max_every = int(option(self.options, job, "max_every"))
        return choose(
            job, model, memory, lambda sizes: progress(sizes, noise_scale, exponent, most), max_every=max_every
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
