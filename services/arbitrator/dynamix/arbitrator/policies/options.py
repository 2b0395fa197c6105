"""Options of policies: values in a job's specification, each with a default, bounds or names, and a meaning."""

from collections.abc import Mapping
from typing import NamedTuple

from dynamix.schemas.messages import Job
from dynamix.schemas.messages.allocation import EXACT, Allocation, Exchange, is_permitted
from dynamix.schemas.messages.policies import PolicyOptions
from dynamix.schemas.messages.policy_options import Bounds
from dynamix.schemas.spelling import suggestion


class Option(NamedTuple):
    """An option of a policy in `Job.policy_options`: its meaning and bounds."""

    default: float | str
    low: float
    high: float
    meaning: str
    whole: bool = False
    """Only whole numbers; with bounds 0 and 1 a switch."""
    names: tuple[str, ...] = ()
    """Names of an option that takes no numbers."""

    def fault(self, value: float | str) -> str | None:
        """Why the option cannot have this value, or `None`."""
        return Bounds(self.low, self.high, self.whole, self.names).fault(value)


Options = Mapping[str, Option]


def switch(default: float, meaning: str) -> Option:
    """An option that is on (1) or off (0)."""
    return Option(default, 0, 1, meaning, whole=True)


def named(names: tuple[str, ...], meaning: str, default: str | None = None) -> Option:
    """An option that takes one of these names, by default the first."""
    return Option(default or names[0], 0, 0, f"{meaning}: {', '.join(names)}", names=names)


def track(default: float) -> Option:
    """The option that all our policies have: whether the training processes divide the global batch."""
    return switch(
        default, "1: ranks divide the batch every step, if the job supports it; 0: the policy does once per window"
    )


def check_options(policy: str, known: Options, given: PolicyOptions) -> None:
    """Refuse what a policy would not understand.

    Raises:
        ValueError: when an option is unknown or out of its bounds; the text names it and what there is.
    """
    for name, value in given.items():
        if name not in known:
            raise ValueError(f"policy {policy!r} has no option {name!r}{suggestion(name, known)}")
        if fault := known[name].fault(value):
            shown = value if isinstance(value, str) else f"{value:g}"
            raise ValueError(f"option {name}={shown} of policy {policy!r} {fault}: {known[name].meaning}")


def option(known: Options, job: Job, name: str) -> float:
    """The job's value of an option that takes numbers, or its default."""
    return float(job.policy_options.get(name, known[name].default))


def name_of(known: Options, job: Job, name: str) -> str:
    """The job's value of an option that takes names, or its default."""
    return str(job.policy_options.get(name, known[name].default))


def allocation_of(
    known: Options, job: Job, local_batch_sizes: tuple[int, ...], exchange: Exchange = EXACT
) -> Allocation:
    """These sizes, divided further by the training processes where the job's options say so.

    Gradients travel by `exchange` where the job permits it, else as they are.
    """
    permitted = exchange if is_permitted(exchange, job.exchange, job.policy_options.values()) else EXACT
    return Allocation(local_batch_sizes, "tracking" if tracks(known, job) else "fixed", permitted)


def tracks(known: Options, job: Job) -> bool:
    """Whether the training processes of this job divide the global batch themselves."""
    return job.supports_tracking and option(known, job, "track") == 1
