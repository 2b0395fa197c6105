"""Values of the options that a job's specification gives its policy; `schemas.policies` states the options."""

from dynamix.schemas.messages import Job
from dynamix.schemas.messages.allocation import EXACT, Allocation, Exchange, is_permitted
from dynamix.schemas.policies import Options


def option(known: Options, job: Job, name: str) -> float:
    """The job's value of an option that takes numbers, or its default."""
    return float(job.policy_options.get(name, known[name].default))


def name_of(known: Options, job: Job, name: str) -> str:
    """The job's value of an option that takes names, or its default."""
    return str(job.policy_options.get(name, known[name].default))


def allocation_of(
    known: Options, job: Job, local_batch_sizes: tuple[int, ...], exchange: Exchange = EXACT
) -> Allocation:
    """The allocation of these sizes, divided further by the training processes if the job's options set it.

    Gradients travel by `exchange` where the job permits it, else as they are.
    """
    permitted = exchange if is_permitted(exchange, job.exchange, job.policy_options.values()) else EXACT
    return Allocation(local_batch_sizes, "tracking" if tracks(known, job) else "fixed", permitted)


def tracks(known: Options, job: Job) -> bool:
    """Whether the training processes of this job divide the global batch themselves."""
    return job.supports_tracking and option(known, job, "track") == 1
