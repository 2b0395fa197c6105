"""Published rules for the exchange of gradients: a sync period or a codec, decided once per window. Baselines.

`diloco`, `qsr` and `adacomm` set the period of local steps, `accordion` and `gravac` a codec. All hold the job's batch;
with option `track` the training processes divide it. What a job does not permit is not decided: periods need
`attach(exchange="local")`, codecs with loss `attach(exchange="lossy")`; elsewhere gradients are exchanged exactly.
"""

import math
from typing import ClassVar, Self

import msgspec
from msgspec.structs import replace

from dynamix.arbitrator.policies.policy import (
    Array32,
    Decision,
    allocation_of,
    job_value,
    name_of,
    option,
    pack,
    unpack,
)
from dynamix.schemas.messages import Job
from dynamix.schemas.messages.allocation import LOSSY_CODECS, Exchange, is_permitted
from dynamix.schemas.policies import MOST_STEPS, POLICY_OPTIONS, Options, initial_exchange


def _is_known(value: float) -> bool:
    return 0 < value < math.inf


class _ExchangeRule:
    """Keeps the job's own sizes, and decides an exchange."""

    name = ""
    version = 1
    options: ClassVar[Options] = {}

    def _decision(self, job: Job, exchange: Exchange, reason: str, state: msgspec.Struct | None = None) -> Decision:
        allocation = allocation_of(self.options, job, job.initial_local_batch_sizes, exchange)
        return Decision(allocation, carry=b"" if state is None else pack(state), reason=reason)


class DiLoCo(_ExchangeRule):
    """A fixed sync period with an outer Nesterov step (DiLoCo: Douillard et al., arXiv 2311.08105).

    Published periods are some hundred steps; the default is for short jobs. Needs `attach(exchange="local")`.
    """

    name = "diloco"
    options: ClassVar[Options] = POLICY_OPTIONS["diloco"]

    def decide(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Decision:  # noqa: ARG002 - the protocol's arguments
        """The job's initial sizes, and the exchange of its options."""
        exchange = initial_exchange(self.name, job.policy_options)
        return self._decision(job, exchange, f"as its options say: gradients {exchange.label}")


class _Period(msgspec.Struct, array_like=True):
    every: int = 0


ROUNDING = 1e-6
"""States are in float32: a period that is a whole number may come out a little below it."""


class QSR(_ExchangeRule):
    """Local steps by the Quadratic Synchronization Rule (Gu et al., arXiv 2310.14423).

        h = max(h_min, floor((alpha / learning rate)^2))

    The period grows as the learning rate falls. Published settings have h_min 2 or 4 and (alpha / peak)^2 = 4.8, as the
    default has at a rate of 0.1. Needs `attach(exchange="local")`.
    """

    name = "qsr"
    options: ClassVar[Options] = POLICY_OPTIONS["qsr"]

    def decide(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Decision:  # noqa: ARG002 - the protocol's arguments
        """The period of the newest learning rate that is known; `h_min` before the first."""
        rate, least = job_value(global_F, "learning_rate"), int(option(self.options, job, "h_min"))
        if _is_known(rate):
            period = math.floor((option(self.options, job, "alpha") / rate) ** 2 * (1 + ROUNDING))
            every, at = max(least, min(period, MOST_STEPS)), f"at a learning rate of {rate:g}"
        else:
            every, at = max(unpack(_Period, carry).every, least), "while no learning rate is known"
        exchange = Exchange(every=every, codec=name_of(self.options, job, "codec"))
        return self._decision(job, exchange, f"a period of {every} steps {at}", _Period(every))


class _Interval(msgspec.Struct, array_like=True):
    """Sums over the windows of an interval so far."""

    total: float = 0.0
    """Over the windows in which the value was known."""
    num_known: int = 0
    num_windows: int = 0

    def take(self, value: float, num_windows: float) -> tuple[Self, float | None]:
        """With the value of a window; after the last of `num_windows` empty again, and the mean, NaN if unknown."""
        is_known = _is_known(value)
        total, num_known = self.total + (value if is_known else 0.0), self.num_known + is_known
        if self.num_windows + 1 < num_windows:
            return replace(self, total=total, num_known=num_known, num_windows=self.num_windows + 1), None
        return replace(self, total=0.0, num_known=0, num_windows=0), total / num_known if num_known else math.nan


class _Losses(_Interval, array_like=True):
    """The loss so far."""

    first_loss: float = math.nan
    first_rate: float = math.nan
    rate: float = math.nan
    """The learning rate that tau was decided at."""
    tau: float = math.nan
    """NaN before the first interval ended."""


class AdaComm(_ExchangeRule):
    """Local steps that become fewer as the loss falls (AdaComm: Wang and Joshi, arXiv 1810.08313).

        tau = ceil(tau_0 sqrt((lr_0 / lr) (F / F_0))); if that is not below the last tau, decay * the last tau

    F is the mean training loss of an interval, lr the learning rate at its end, F_0 and lr_0 those of the first one.
    tau is decided once per interval (published: a minute). Needs `attach(exchange="local")`.
    """

    name = "adacomm"
    options: ClassVar[Options] = POLICY_OPTIONS["adacomm"]

    def decide(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Decision:  # noqa: ARG002 - the protocol's arguments
        """The period of the last interval that ended; `tau_0` before, and while no loss is known."""
        tau_0, rate = option(self.options, job, "tau_0"), job_value(global_F, "learning_rate")
        interval = option(self.options, job, "interval")
        seen, mean = unpack(_Losses, carry).take(job_value(global_F, "loss"), interval)
        if mean is not None and _is_known(mean):
            seen = self._next(job, seen, mean, rate if _is_known(rate) else seen.rate)
        tau = tau_0 if math.isnan(seen.tau) else seen.tau
        exchange = Exchange(every=min(max(math.ceil(tau), 1), MOST_STEPS), codec=name_of(self.options, job, "codec"))
        by = "before the loss is known" if math.isnan(seen.first_loss) else f"by a loss that was {seen.first_loss:g}"
        return self._decision(job, exchange, f"a period of {exchange.every} steps {by}", seen)

    def _next(self, job: Job, seen: _Losses, loss: float, rate: float) -> _Losses:
        """After an interval of this mean loss."""
        tau_0 = option(self.options, job, "tau_0")
        if math.isnan(seen.first_loss):
            return replace(seen, first_loss=loss, first_rate=rate, rate=rate, tau=tau_0)
        ratio = seen.first_rate / rate if seen.first_rate > 0 and rate > 0 else 1.0
        tau = float(math.ceil(tau_0 * math.sqrt(min(ratio * loss / seen.first_loss, 1e9))))
        if not (tau < seen.tau or rate < seen.rate):
            tau = math.ceil(option(self.options, job, "decay") * seen.tau)
        return replace(seen, rate=rate, tau=float(min(max(tau, 1), MOST_STEPS)))


class _Norms(_Interval, array_like=True):
    """The gradient's norm so far."""

    before: float = math.nan
    """Mean of the interval before this one."""
    rate: float = math.nan
    """The learning rate at its end."""
    is_critical: bool = True


class Accordion(_ExchangeRule):
    """Little compression while the gradient's norm changes fast (Agarwal et al., arXiv 2010.16248).

        critical, if |N_before - N| / N_before >= eta, or the learning rate fell: codec `mild`; else codec `hard`

    N is the mean norm of a step's gradient over an interval; published with eta 0.5, ten epochs, and a norm per layer.
    Our codecs lose far less than those that it was made for. Needs `attach(exchange="lossy")`.
    """

    name = "accordion"
    options: ClassVar[Options] = POLICY_OPTIONS["accordion"]

    def decide(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Decision:  # noqa: ARG002 - the protocol's arguments
        """The codec of the last interval that ended; the mild one before, and while no norm is known."""
        interval = option(self.options, job, "interval")
        seen, mean = unpack(_Norms, carry).take(job_value(global_F, "gradient_norm"), interval)
        if mean is not None:
            rate, is_critical = job_value(global_F, "learning_rate"), seen.is_critical
            rate = rate if _is_known(rate) else seen.rate
            if not math.isnan(seen.before) and not math.isnan(mean):
                change = abs(seen.before - mean) / seen.before
                is_critical = change >= option(self.options, job, "eta") or rate < seen.rate
            before = seen.before if math.isnan(mean) else mean
            seen = replace(seen, before=before, rate=rate, is_critical=is_critical)
        codec = name_of(self.options, job, "mild" if seen.is_critical else "hard")
        state = "may change fast" if seen.is_critical else f"stays near {seen.before:g}"
        return self._decision(job, Exchange(codec=codec), f"codec {codec}: the gradient's norm {state}", seen)


CODECS = ("none", "bf16", "int8")
"""Candidates, from the least compression to the most. `rows` and `sketch` save nothing where gradients are dense."""
LAG = 2
"""Windows after which a decision is in effect."""
_UNKNOWN = (math.nan,) * len(CODECS)


class _Trials(msgspec.Struct, array_like=True):
    """Measurements of the codecs, which are numbers here."""

    num_windows: int = 0
    in_effect: tuple[int, ...] = (0,) * LAG
    """Codecs from the window that closed to the newest decision."""
    best: int = 0
    """The choice of the last search."""
    throughput: tuple[float, ...] = _UNKNOWN
    """Samples per second, averaged; NaN where not measured."""
    gain: tuple[float, ...] = _UNKNOWN


class GraVAC(_ExchangeRule):
    """The codec of the greatest throughput times gain (GraVAC: Tyagi and Swany, arXiv 2305.12201).

        gain = |sent|^2 / |unrounded|^2        best: samples per second * gain, of codecs with gain >= floor

    Each permitted codec is tried for some windows; the best one is used until the next search. Unlike GraVAC, which
    encodes every gradient twice, a codec must be active to be measured. Needs `attach(exchange="lossy")`.
    """

    name = "gravac"
    options: ClassVar[Options] = POLICY_OPTIONS["gravac"]

    def decide(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Decision:  # noqa: ARG002 - the protocol's arguments
        """The codec that is to be tried, or the best one of the last search."""
        seen = self._observe(job, unpack(_Trials, carry), global_F)
        exchanges = [Exchange(codec=codec) for codec in CODECS]
        candidates = [number for number, each in enumerate(exchanges) if is_permitted(each, job.exchange)]
        trial = int(option(self.options, job, "trial"))
        searched = trial * len(candidates)
        place = seen.num_windows % (searched + int(option(self.options, job, "hold")))
        best = seen.best
        if place == searched:
            floor = option(self.options, job, "floor")
            fit = [number for number in candidates if seen.throughput[number] > 0 and seen.gain[number] >= floor]
            best = max(fit, key=lambda number: seen.throughput[number] * seen.gain[number], default=0)
        chosen = candidates[place // trial] if place < searched else best
        seen = replace(seen, num_windows=seen.num_windows + 1, in_effect=(*seen.in_effect[1:], chosen), best=best)
        reason = f"codec {CODECS[chosen]}, " + ("to try it" if place < searched else "by throughput times gain")
        return self._decision(job, exchanges[chosen], reason, seen)

    def _observe(self, job: Job, seen: _Trials, global_F: Array32) -> _Trials:
        number = seen.in_effect[0]
        throughput = job_value(global_F, "throughput")
        gain = job_value(global_F, "coding_gain") if CODECS[number] in LOSSY_CODECS else 1.0
        if not (_is_known(throughput) and _is_known(gain)):
            return seen
        smoothing, averages = option(self.options, job, "smoothing"), []
        for values, newest in ((seen.throughput, throughput), (seen.gain, gain)):
            old = values[number] if values[number] > 0 else newest
            averages.append((*values[:number], old + smoothing * (newest - old), *values[number + 1 :]))
        return replace(seen, throughput=averages[0], gain=averages[1])
