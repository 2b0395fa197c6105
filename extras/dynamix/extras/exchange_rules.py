"""Published rules for the exchange of gradients: a sync period or a codec, decided once per window. Baselines.

`diloco`, `qsr` and `adacomm` set the period of local steps, `accordion` and `gravac` a codec. All hold the job's batch;
with option `track` the training processes divide it. What a job does not permit is not decided: periods need
`attach(exchange="local")`, codecs with loss `attach(exchange="lossy")`; elsewhere gradients travel as they are.
"""

import math
from typing import ClassVar

import msgspec
from msgspec.structs import replace

from dynamix.arbitrator.policies.policy import (
    Array32,
    Decision,
    Option,
    Options,
    allocation_of,
    job_value,
    name_of,
    named,
    option,
    pack,
    track,
    unpack,
)
from dynamix.schemas.messages import Job
from dynamix.schemas.messages.allocation import EXCHANGE_CODECS, LOSSY_CODECS, Exchange, exchange_of, is_permitted
from dynamix.schemas.messages.policies import EXCHANGE_OPTIONS
from dynamix.schemas.messages.policy_options import MOST_STEPS

MOST_WINDOWS = 10_000


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


_DILOCO = EXCHANGE_OPTIONS["diloco"]


class DiLoCo(_ExchangeRule):
    """A fixed sync period with an outer Nesterov step (DiLoCo: Douillard et al., arXiv 2311.08105).

    Rounds of `every` local steps from the first step on, then a Nesterov step from where the round began towards
    the mean. Published periods are some hundred steps; the default here is for short jobs. The batch stays. It
    needs `attach(exchange="local")`.
    """

    name = "diloco"
    options: ClassVar[Options] = {
        "every": Option(_DILOCO["every"], 2, MOST_STEPS, "optimizer steps between two averagings", whole=True),
        "outer_rate": Option(_DILOCO["outer_rate"], 0.001, 10, "rate of the outer step; 1 is the mean"),
        "outer_momentum": Option(_DILOCO["outer_momentum"], 0, 0.999, "its Nesterov momentum"),
        "codec": named(EXCHANGE_CODECS, "how what moved is encoded"),
        "track": track(0),
    }

    def decide(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Decision:  # noqa: ARG002 - the protocol's arguments
        """The job's initial sizes, and the exchange of its options."""
        exchange = exchange_of({**_DILOCO, **job.policy_options})
        return self._decision(job, exchange, f"as its options say: gradients {exchange.label}")


class _Period(msgspec.Struct, array_like=True):
    every: int = 0


ROUNDING = 1e-6
"""States are in float32: a period that is a whole number may come out a little below it."""


class QSR(_ExchangeRule):
    """Local steps by the Quadratic Synchronization Rule (Gu et al., arXiv 2310.14423).

        h = max(h_min, floor((alpha / learning rate)^2))

    The period grows as the learning rate of the steps falls. Published settings have h_min 2 or 4 and (alpha /
    peak)^2 = 4.8, which the default is at a rate of 0.1. The batch stays. It needs `attach(exchange="local")`;
    elsewhere gradients are exchanged exactly.
    """

    name = "qsr"
    options: ClassVar[Options] = {
        "alpha": Option(0.22, 1e-6, 1e3, "learning rate at which h is 1, without h_min"),
        "h_min": Option(4, 1, MOST_STEPS, "least steps between two averagings", whole=True),
        "codec": named(EXCHANGE_CODECS, "how what moved is encoded"),
        "track": track(0),
    }

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


class _Losses(msgspec.Struct, array_like=True):
    """The loss so far."""

    first_loss: float = math.nan
    first_rate: float = math.nan
    rate: float = math.nan
    """The learning rate that tau was decided at."""
    tau: float = math.nan
    """NaN before the first interval ended."""
    loss_sum: float = 0.0
    """Over the windows of this interval with a known loss."""
    num_known: int = 0
    num_windows: int = 0


class AdaComm(_ExchangeRule):
    """Local steps that become fewer as the loss falls (AdaComm: Wang and Joshi, arXiv 1810.08313).

        tau = ceil(tau_0 sqrt((lr_0 / lr) (F / F_0)))   but decay * the last tau, where that is not below the last one

    F is the mean training loss of an interval, lr the learning rate at its end, F_0 and lr_0 those of the first
    one; tau is decided once per interval (published: a minute) and grows only with a falling learning rate. The
    batch stays. It needs `attach(exchange="local")`; elsewhere gradients are exchanged exactly.
    """

    name = "adacomm"
    options: ClassVar[Options] = {
        "tau_0": Option(10, 1, MOST_STEPS, "steps between two averagings at the beginning", whole=True),
        "interval": Option(10, 1, MOST_WINDOWS, "windows between two decisions", whole=True),
        "decay": Option(0.5, 0.01, 1, "factor on tau where the loss alone would not make it less"),
        "codec": named(EXCHANGE_CODECS, "how what moved is encoded"),
        "track": track(0),
    }

    def decide(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Decision:  # noqa: ARG002 - the protocol's arguments
        """The period of the last interval that ended; `tau_0` before, and while no loss is known."""
        seen, tau_0 = unpack(_Losses, carry), option(self.options, job, "tau_0")
        loss, rate = job_value(global_F, "loss"), job_value(global_F, "learning_rate")
        if _is_known(loss):
            seen = replace(seen, loss_sum=seen.loss_sum + loss, num_known=seen.num_known + 1)
        seen = replace(seen, num_windows=seen.num_windows + 1)
        if seen.num_windows >= option(self.options, job, "interval"):
            mean = seen.loss_sum / seen.num_known if seen.num_known else math.nan
            seen = replace(seen, loss_sum=0.0, num_known=0, num_windows=0)
            if _is_known(mean):
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


class _Norms(msgspec.Struct, array_like=True):
    """The gradient's norm so far."""

    before: float = math.nan
    """Mean of the interval before this one."""
    rate: float = math.nan
    """The learning rate at its end."""
    norm_sum: float = 0.0
    """Over the windows of this interval with a known norm."""
    num_known: int = 0
    num_windows: int = 0
    is_critical: bool = True


class Accordion(_ExchangeRule):
    """Little compression while the gradient's norm changes fast (Agarwal et al., arXiv 2010.16248).

        critical, if |N_before - N| / N_before >= eta, or the learning rate fell: codec `mild`; else codec `hard`

    N is the mean norm of a step's gradient over an interval; published with eta 0.5, ten epochs, and a norm per
    layer, where we have one for all. It starts as critical. Our codecs lose far less than those that it was made
    for. The batch stays. It needs `attach(exchange="lossy")`; elsewhere gradients are exchanged exactly.
    """

    name = "accordion"
    options: ClassVar[Options] = {
        "eta": Option(0.5, 0, 100, "relative change of the norm from which on it is critical"),
        "interval": Option(10, 1, MOST_WINDOWS, "windows whose mean norms are compared", whole=True),
        "mild": named(EXCHANGE_CODECS, "codec while it is critical", "bf16"),
        "hard": named(EXCHANGE_CODECS, "codec elsewhere", "int8"),
        "track": track(0),
    }

    def decide(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Decision:  # noqa: ARG002 - the protocol's arguments
        """The codec of the last interval that ended; the mild one before, and while no norm is known."""
        seen, norm = unpack(_Norms, carry), job_value(global_F, "gradient_norm")
        if _is_known(norm):
            seen = replace(seen, norm_sum=seen.norm_sum + norm, num_known=seen.num_known + 1)
        seen = replace(seen, num_windows=seen.num_windows + 1)
        if seen.num_windows >= option(self.options, job, "interval"):
            mean = seen.norm_sum / seen.num_known if seen.num_known else math.nan
            rate, is_critical = job_value(global_F, "learning_rate"), seen.is_critical
            rate = rate if _is_known(rate) else seen.rate
            if not math.isnan(seen.before) and not math.isnan(mean):
                change = abs(seen.before - mean) / seen.before
                is_critical = change >= option(self.options, job, "eta") or rate < seen.rate
            seen = _Norms(seen.before if math.isnan(mean) else mean, rate, is_critical=is_critical)
        codec = name_of(self.options, job, "mild" if seen.is_critical else "hard")
        state = "may change fast" if seen.is_critical else f"stays near {seen.before:g}"
        return self._decision(job, Exchange(codec=codec), f"codec {codec}: the gradient's norm {state}", seen)


CODECS = ("none", "bf16", "int8")
"""Candidates, from the least compression to the most. `rows` and `sketch` save nothing where gradients are dense."""
LAG = 2
"""Windows after which a decision is in effect."""
_UNKNOWN = (math.nan,) * len(CODECS)


class _Trials(msgspec.Struct, array_like=True):
    """What is known of the codecs, which are numbers here."""

    num_windows: int = 0
    in_effect: tuple[int, ...] = (0,) * LAG
    """In the window that closed, and so on to the newest decision."""
    best: int = 0
    """The choice of the last search."""
    throughput: tuple[float, ...] = _UNKNOWN
    """Samples per second, averaged; NaN where not measured."""
    gain: tuple[float, ...] = _UNKNOWN


class GraVAC(_ExchangeRule):
    """The codec of the greatest throughput times gain (GraVAC: Tyagi and Swany, arXiv 2305.12201).

        gain = |what was sent|^2 / |what should have been|^2   samples per second * gain, of codecs with gain >= floor

    Each permitted codec is tried for some windows; the best one is then used until the next search. Gain is the
    state's `coding_gain`, 1 without loss. Unlike GraVAC, which codes every gradient twice, a codec must be active
    to be measured. A codec that rounds has a gain of 1.00; residuals count as lost. The batch stays. It needs
    `attach(exchange="lossy")`; elsewhere only codecs without loss are tried.
    """

    name = "gravac"
    options: ClassVar[Options] = {
        "floor": Option(0.7, 0, 1, "least gain of a codec"),
        "trial": Option(4, LAG + 1, 10_000, "windows for which each codec is tried", whole=True),
        "hold": Option(100, 1, 1e6, "windows between two searches", whole=True),
        "smoothing": Option(0.5, 0.01, 1, "weight of the newest window in the averages"),
        "track": track(0),
    }

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
