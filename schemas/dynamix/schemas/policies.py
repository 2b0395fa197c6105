"""Policies and their options, as trainers, arbitrators and agents must agree on them, by name; the progress of a step.

The script's process refuses options that the arbitrator would refuse too late: `POLICY_OPTIONS` is the one place that
states them, for our policies that are code. Learned ones have theirs in their files.
"""

import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .messages.allocation import EXACT, EXCHANGE_CODECS, ROUTES, TOKEN_PATTERN, Exchange, Split
from .spelling import suggestion

Array64 = npt.NDArray[np.float64]

PolicyOptions = Mapping[str, float | str]
"""Options of a policy by name: numbers, or names such as that of a codec."""

DEFAULT_POLICY = "rule"
"""Default policy of jobs with an adaptive global batch: the best one on held-out scenarios (`dynamix evaluate`)."""

SPLIT_POLICY = "split"
"""Default policy of jobs with a fixed global batch."""

KEEPS_GLOBAL_BATCH = frozenset({"static", "split", "proportional", "diloco", "qsr", "adacomm", "accordion", "gravac"})
"""Our policies that never change the global batch."""

RECURRING = frozenset({"rule"})
"""Our policies that start from profiles of a job family and store them."""

STIGMERGY = "stigmergy"
"""The policy of agents on all nodes: the ranks divide each step by the traces that these leave; no centre decides."""

RATE_EXPONENTS: Mapping[str, float] = MappingProxyType({"none": 0.0, "sqrt": 0.5, "linear": 1.0})
"""Exponent of B in each learning-rate rule."""

ROUNDED = 0.3
"""Time of a sum by `int8` over that of gradients as they are, before it was measured."""
LOSS_OF_EIGHT, LOSS_POWER, MOST_EVERY = 0.07, 0.7, 16
"""k of 8 ranks, and how it grows with their number; longest period."""
LEAST_OUTER, LEAST_ADAPTED, OUTER_MOMENTUM = 4, 8, 0.5
"""Periods from which on rounds end with an outer step, and from which on its rate adapts; its momentum. Rounds of 4
agree because of the optimizer's momentum: with a rate that adapts they took up to twice the samples."""


def rounded_exchange(round_s: float, compute_s: float, num_ranks: int) -> Exchange:
    """`int8` and the steps between two averagings under `rule`, from the time of one and of computing a step.

    h = sqrt(C / c * (1 / k - 1)),  k = 0.07 (N / 8)^0.7         to the nearest power of two
    """
    loss = min(LOSS_OF_EIGHT * (num_ranks / 8) ** LOSS_POWER, 0.99)
    wanted = math.sqrt(max(round_s, 0.0) / compute_s * (1.0 / loss - 1.0))
    every = int(min(2 ** round(math.log2(max(wanted, 1.0))), MOST_EVERY))
    if every < LEAST_OUTER:
        return Exchange(codec="int8", every=every)
    outer_rate = 0.0 if every >= LEAST_ADAPTED else 1.0 - OUTER_MOMENTUM
    return Exchange(codec="int8", every=every, outer_rate=outer_rate, outer_momentum=OUTER_MOMENTUM)


# --- options

MOST_STEPS = 1024
"""Largest option for steps between two averagings."""
MOST_WINDOWS = 10_000


class Option(NamedTuple):
    """An option of a policy in `Job.policy_options`: its default, its bounds or names, and its meaning."""

    default: float | str
    low: float
    high: float
    meaning: str
    whole: bool = False
    """Only whole numbers; with bounds 0 and 1 a switch."""
    names: tuple[str, ...] = ()
    """Names of an option that takes no numbers. Where they are the core's codecs, an extension's name fits too."""

    def fault(self, value: float | str) -> str | None:
        """Reason why the option cannot have this value, or `None`."""
        if self.names:
            is_codec = self.names == EXCHANGE_CODECS and isinstance(value, str) and re.search(TOKEN_PATTERN, value)
            return None if is_codec or value in self.names else f"must be one of {', '.join(self.names)}"
        if isinstance(value, str) or not (math.isfinite(value) and self.low <= value <= self.high):
            return f"must be from {self.low:g} to {self.high:g}"
        return "must be a whole number" if self.whole and value != int(value) else None


Options = Mapping[str, Option]


def switch(default: float, meaning: str) -> Option:
    """An option that is on (1) or off (0)."""
    return Option(default, 0, 1, meaning, whole=True)


def named(names: tuple[str, ...], meaning: str, default: str | None = None) -> Option:
    """An option that takes one of these names, by default the first."""
    return Option(default or names[0], 0, 0, f"{meaning}: {', '.join(names)}", names=names)


def track(default: float) -> Option:
    """The option that most of our policies have: whether the training processes divide the global batch."""
    return switch(
        default, "1: ranks divide the batch every step, if the job supports it; 0: the policy does once per window"
    )


_PROPORTIONAL = {
    "smoothing": Option(0.5, 0.01, 1, "weight of the newest window in moving averages"),
    "dead_band": Option(0.03, 0, 1, "share by which a new division must shorten the predicted step"),
    "track": track(0),
}
_CODEC = named(EXCHANGE_CODECS, "codec of the parameters' movements")

POLICY_OPTIONS: Mapping[str, Options] = MappingProxyType(
    {
        "static": {
            "track": track(0),
            "every": Option(1, 1, MOST_STEPS, "optimizer steps between two averagings; above 1: local steps", True),
            "codec": named(EXCHANGE_CODECS, "how gradients are encoded; an extension's codec by its name"),
            "route": named(ROUTES, "how they are summed"),
            "outer_rate": Option(1, 0, 10, "rate of the outer step after local steps; 1 is the mean, 0 adapts"),
            "outer_momentum": Option(0, 0, 0.999, "its Nesterov momentum"),
        },
        "split": {**_PROPORTIONAL, "track": track(1)},
        "random": {"track": track(0)},
        "proportional": _PROPORTIONAL,
        "noise-scale": {
            "multiplier": Option(1.0, 0.01, 100, "global batch over B_noise"),
            "max_change": Option(2.0, 1.01, 100, "greatest factor between two decisions"),
            "proportional": switch(1, "1: divide B by measured speed; 0: equally"),
            "track": track(0),
        },
        "goodput": {
            "smoothing": Option(0.5, 0.01, 1, "weight of the newest window in moving averages"),
            "hysteresis": Option(0.05, 0, 1, "relative gain in predicted goodput that a change must promise"),
            "noise_multiplier": Option(1.0, 0.01, 100, "factor on B_noise; above 1, larger batches are preferred"),
            "proportional": switch(1, "1: divide B by measured speed; 0: equally"),
            "track": track(0),
        },
        "doubling": {
            "every_samples": Option(0, 0, 1e12, "double after so many samples; 0: when the loss stalls"),
            "patience_windows": Option(20, 1, 1e6, "windows without improvement that make a stall", True),
            "min_improvement": Option(0.01, 0, 1, "relative fall of the averaged loss that counts as an improvement"),
            "max_doublings": Option(6, 0, 30, "doublings at most", True),
            "proportional": switch(0, "1: divide B by measured speed; 0: in proportion to the initial sizes"),
            "track": track(0),
        },
        "rule": {
            "noise_multiplier": Option(1.0, 0.01, 100, "factor on B_noise; above 1, larger batches are preferred"),
            "rate_weight": Option(0.5, 0, 1, "exponent of lr(B) in the progress of a step"),
            "max_change": Option(2.0, 1.01, 100, "greatest factor between two decisions"),
            "dead_band": Option(0.03, 0, 1, "relative distance from the best batch below which B stays"),
            "track": track(1),
        },
        STIGMERGY: {
            "evaporation": Option(
                0.5, 0.01, 1, "share of a trace's strength that is lost per window; weight of the newest values"
            ),
            "diffusion": Option(0.2, 0, 1, "share of an appetite that comes from the neighbours"),
            "noise_multiplier": Option(1.0, 0.01, 100, "factor on B_noise; above 1, larger batches are preferred"),
            "rate_weight": Option(0.5, 0, 1, "exponent of lr(B) in the progress of a step"),
            "max_change": Option(2.0, 1.01, 100, "greatest factor between the current global batch and an appetite"),
            "dead_band": Option(
                0.05, 0, 1, "relative distance from the mean appetite below which the global batch stays"
            ),
        },
        "diloco": {
            "every": Option(8, 2, MOST_STEPS, "optimizer steps between two averagings", True),
            "outer_rate": Option(0.7, 0.001, 10, "rate of the outer step; 1 is the mean"),
            "outer_momentum": Option(0.9, 0, 0.999, "its Nesterov momentum"),
            "codec": _CODEC,
            "track": track(0),
        },
        "qsr": {
            "alpha": Option(0.22, 1e-6, 1e3, "learning rate at which h is 1, without h_min"),
            "h_min": Option(4, 1, MOST_STEPS, "least steps between two averagings", True),
            "codec": _CODEC,
            "track": track(0),
        },
        "adacomm": {
            "tau_0": Option(10, 1, MOST_STEPS, "steps between two averagings at the beginning", True),
            "interval": Option(10, 1, MOST_WINDOWS, "windows between two decisions", True),
            "decay": Option(0.5, 0.01, 1, "factor on tau if the loss would not reduce it"),
            "codec": _CODEC,
            "track": track(0),
        },
        "accordion": {
            "eta": Option(0.5, 0, 100, "relative change of the norm that counts as critical"),
            "interval": Option(10, 1, MOST_WINDOWS, "windows whose mean norms are compared", True),
            "mild": named(EXCHANGE_CODECS, "codec while critical", "bf16"),
            "hard": named(EXCHANGE_CODECS, "codec otherwise", "int8"),
            "track": track(0),
        },
        "gravac": {
            "floor": Option(0.7, 0, 1, "least gain of a codec"),
            "trial": Option(4, 3, MOST_WINDOWS, "windows for which each codec is tried", True),
            "hold": Option(100, 1, 1e6, "windows between two searches", True),
            "smoothing": Option(0.5, 0.01, 1, "weight of the newest window in moving averages"),
            "track": track(0),
        },
    }
)

VERSION_OPTION = "version"
VERSION = Option(1, 1, 2**53 - 1, "of the policy; without it the newest when a generation begins", whole=True)
"""The option of every job that requests one version of its policy instead of the newest."""

STIGMERGY_OPTIONS = {name: float(one.default) for name, one in POLICY_OPTIONS[STIGMERGY].items()}
"""Its defaults: the ranks and the agents need them, and no arbitrator tells them."""

OUR_POLICIES = frozenset(POLICY_OPTIONS) | {
    *("ppo", "ppo-1", "ppo-2", "ppo-3", "ppo-4"),
    *("ppo-paper", "ppo-paper-1", "ppo-paper-2", "ppo-paper-3", "ppo-paper-4"),
}
"""The policies that come with the arbitrator; others are learned ones on the bus, or of other packages beside it."""

DIVIDED_BY_RANKS = frozenset(
    {"ppo", *(name for name, options in POLICY_OPTIONS.items() if "track" in options and options["track"].default == 1)}
)
"""Policies that leave the division of the global batch to the training processes unless option `track` is 0."""

EXCHANGE_POLICIES = frozenset({"static", "diloco"})
"""Policies whose options set the gradient exchange, from the first step on."""


def option_value(text: str) -> float | str:
    """The value of an option that a person wrote: a number, or else a name."""
    try:
        return float(text)
    except ValueError:
        return text


def check_options(policy: str, known: Options, given: PolicyOptions) -> None:
    """Raise for options that a policy does not have, or values out of bounds.

    Raises:
        ValueError: when an option is unknown or out of its bounds; the message names it and what there is.
    """
    known = {**known, VERSION_OPTION: VERSION}
    for name, value in given.items():
        if name not in known:
            raise ValueError(f"policy {policy!r} has no option {name!r}{suggestion(name, known)}")
        if fault := known[name].fault(value):
            shown = value if isinstance(value, str) else f"{value:g}"
            raise ValueError(f"option {name}={shown} of policy {policy!r} {fault}: {known[name].meaning}")


def exchange_of(options: PolicyOptions) -> Exchange:
    """The exchange of a policy's options `every`, `codec`, `route`, and with local steps the outer step's two."""
    every = int(options.get("every", 1))
    outer = options if every > 1 else {}
    return Exchange(
        every=every,
        codec=str(options.get("codec", "none")),
        route=str(options.get("route", "all-reduce")),
        outer_rate=float(outer.get("outer_rate", 1.0)),
        outer_momentum=float(outer.get("outer_momentum", 0.0)),
    )


def initial_exchange(policy: str, options: PolicyOptions) -> Exchange:
    """The exchange of the first step, before any decision."""
    if policy not in EXCHANGE_POLICIES:
        return EXACT
    return exchange_of({name: one.default for name, one in POLICY_OPTIONS[policy].items()} | {**options})


def initial_split(policy: str, options: PolicyOptions, *, supports_tracking: bool) -> Split:
    """The division of the global batch from the first step on, before any decision.

    The ranks need no bus to divide it: where a policy leaves that to them, they begin at once. Waiting for the first
    decision would cost some thirty steps at the pace of the slowest rank.
    """
    if policy == STIGMERGY:
        return "traces"
    tracks = options.get("track", float(policy in DIVIDED_BY_RANKS)) == 1
    return "tracking" if supports_tracking and tracks else "fixed"


# --- progress of a step: `rule` weighs it against its model of the step's time, the agents of `stigmergy` against what
# they see of it, by the same formula and with the same bound.

MOST_NOISE_SCALES = 16.0
"""Above so many times B_noise a step is worth no more. Without a bound 1,024 ranks behind a ring of 0.4 s per step went
to 372,469 samples at a noise scale of 60, and to a learning rate of 2.7; 0.8 trained, from 1.1 on the loss diverged."""


def progress(
    global_batch_sizes: Array64, noise_scale: float, rate_exponent: float = 0.0, most: float = math.inf
) -> Array64:
    """Progress of a step of B samples, up to a constant: B^rate_exponent B / (B + B_noise); constant above `most`.

    With exponent 0 that is McCandlish et al. (arXiv 1812.06162): the learning rate is the best one for each B. A rule
    that sets it in proportion to B^e instead makes a step of little noise worth as much more: the first factor. It has
    no bound of its own, unlike the learning rates that a training bears.
    """
    counted = np.minimum(global_batch_sizes, most)
    return counted**rate_exponent * counted / (counted + noise_scale)


def most_worthwhile(noise_scale: float, base_global_batch_size: int) -> float:
    """The global batch above which a step is worth no more.

    `base_global_batch_size` is that of the user's learning rate: early in a training B_noise alone is too small.
    """
    return MOST_NOISE_SCALES * max(noise_scale, base_global_batch_size)
