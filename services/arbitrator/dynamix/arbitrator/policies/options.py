"""Options of policies: numbers in a job's specification, each with one default, bounds and a meaning."""

from collections.abc import Mapping
from typing import NamedTuple

from dynamix.schemas.messages import Job
from dynamix.schemas.messages.allocation import (
    EXACT,
    FIRST_OTHER_CODEC,
    MAX_OTHER_CODECS,
    NAMED_OPTIONS,
    Allocation,
    Exchange,
    is_permitted,
)
from dynamix.schemas.messages.policy_options import Bounds
from dynamix.schemas.spelling import suggestion


class Option(NamedTuple):
    """What one number of `Job.policy_options` means to a policy."""

    default: float
    low: float
    high: float
    meaning: str
    whole: bool = False
    """Only whole numbers; with bounds 0 and 1 a switch."""
    others: tuple[float, float] | None = None
    """Bounds of further values, apart from those."""

    def fault(self, value: float) -> str | None:
        """What is wrong with a value, `None` when nothing is."""
        return Bounds(self.low, self.high, self.whole, self.others).fault(value)


Options = Mapping[str, Option]


def switch(default: float, meaning: str) -> Option:
    """An option that is on (1) or off (0)."""
    return Option(default, 0, 1, meaning, whole=True)


def named(name: str, meaning: str, default: str = "", *, has_others: bool = False) -> Option:
    """An option whose numbers have names, which people may write instead; by default the first of them.

    With `has_others` it also takes the numbers of codecs of other packages.
    """
    names = NAMED_OPTIONS[name]
    meaning += ": " + ", ".join(f"{number} {each}" for number, each in enumerate(names))
    others = (FIRST_OTHER_CODEC, FIRST_OTHER_CODEC + MAX_OTHER_CODECS - 1) if has_others else None
    if others is not None:
        meaning += f"; from {others[0]} on those of other packages that the job names"
    return Option(names.index(default) if default else 0, 0, len(names) - 1, meaning, whole=True, others=others)


def track(default: float) -> Option:
    """The option that all our policies have: whether the training processes divide the global batch."""
    return switch(
        default, "1: the training processes divide it, every step, where the job supports that; 0: the policy"
    )


def check_options(policy: str, known: Options, given: Mapping[str, float]) -> None:
    """Refuse what a policy would not understand.

    Raises:
        ValueError: when an option is unknown or out of its bounds; the text names it and what there is.
    """
    for name, value in given.items():
        if name not in known:
            raise ValueError(f"policy {policy!r} has no option {name!r}{suggestion(name, known)}")
        if fault := known[name].fault(value):
            raise ValueError(f"option {name}={value:g} of policy {policy!r} {fault}: {known[name].meaning}")


def option(known: Options, job: Job, name: str) -> float:
    """The job's value of an option, or its default."""
    return job.policy_options.get(name, known[name].default)


def allocation_of(
    known: Options, job: Job, local_batch_sizes: tuple[int, ...], exchange: Exchange = EXACT
) -> Allocation:
    """These sizes, divided further by the training processes where the job's options say so.

    Gradients travel by `exchange` where the job permits it, else as they are.
    """
    permitted = exchange if is_permitted(exchange, job.exchange, job.other_codecs) else EXACT
    return Allocation(local_batch_sizes, "tracking" if tracks(known, job) else "fixed", permitted)


def tracks(known: Options, job: Job) -> bool:
    """Whether the training processes of this job divide the global batch themselves."""
    return job.supports_tracking and option(known, job, "track") == 1
