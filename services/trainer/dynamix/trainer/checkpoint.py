"""The part of a checkpoint that is ours: plain numbers and lists, safe for `torch.load(weights_only=True)`."""

from typing import Any, NamedTuple

import msgspec

from dynamix.schemas.allocation import Allocation
from dynamix.schemas.apportion import apportion

from .data.sampler import Position
from .data.schedule import Schedule, ScheduleEntry
from .gradient.noise import NoiseAverage
from .job.identity import Attempt
from .steering.tracking import FilterState, RateFilter

VERSION = 4
READABLE = (3, 4)
"""Version 3 knew sizes and split of an allocation only."""


class DataIdentity(NamedTuple):
    """What the order of the samples depends on; a position means nothing in another order."""

    num_samples: int
    seed: int
    shuffle: bool


class Checkpoint(NamedTuple):
    """A saved session."""

    job: str
    generation: int
    attempt: Attempt
    data: DataIdentity
    position: Position
    world_size: int
    schedule: list[ScheduleEntry]
    """The sizes in force at the position, and those already adopted for later."""
    speeds: FilterState
    """What tracking knows of each rank's speed."""
    noise: tuple[float, float, float]
    memory_caps: tuple[int, ...]


def dump(checkpoint: Checkpoint) -> dict[str, Any]:
    """The checkpoint as plain containers."""
    return {
        "version": VERSION,
        "job": checkpoint.job,
        "generation": checkpoint.generation,
        "attempt": checkpoint.attempt._asdict(),
        "data": checkpoint.data._asdict(),
        "position": checkpoint.position._asdict(),
        "world_size": checkpoint.world_size,
        "schedule": [[step, *msgspec.to_builtins(allocation)] for step, allocation in checkpoint.schedule],
        "speeds": [list(part) for part in checkpoint.speeds],
        "noise": list(checkpoint.noise),
        "memory_caps": list(checkpoint.memory_caps),
    }


def parse(state: dict[str, Any], data: DataIdentity) -> Checkpoint:
    """The checkpoint in what `dump` returned.

    Raises:
        ValueError: when it is of another version, or was saved over other data.
    """
    if state.get("version") not in READABLE:
        raise ValueError(f"session state of version {state.get('version')!r}: this program reads 3 and 4")
    saved = DataIdentity(**state["data"])
    if saved != data:
        raise ValueError(f"the session state was saved with {saved}, but this session has {data}: attach alike")
    return Checkpoint(
        job=state["job"],
        generation=state["generation"],
        attempt=Attempt(**state["attempt"]),
        data=saved,
        position=Position(**state["position"]),
        world_size=state["world_size"],
        schedule=[ScheduleEntry(step, msgspec.convert(parts, Allocation)) for step, *parts in state["schedule"]],
        speeds=FilterState(*map(tuple, state["speeds"])),
        noise=tuple(state["noise"]),
        memory_caps=tuple(state["memory_caps"]),
    )


def restore_schedule(schedule: Schedule, checkpoint: Checkpoint, lower: int, caps: tuple[int, ...]) -> None:
    """Put the saved sizes in force, none above its rank's bound. A world of another size starts with its own sizes.

    Who divides the global batch is what the job says now: it may go on under another policy, or with a hook that
    cannot carry times.
    """
    if checkpoint.world_size != len(caps):
        schedule.reset(checkpoint.position.step, schedule.newest)
        return
    split = schedule.newest.split
    saved = [(step, msgspec.structs.replace(allocation, split=split)) for step, allocation in checkpoint.schedule]
    (first_step, first), *later = [(step, _capped(allocation, lower, caps)) for step, allocation in saved]
    schedule.reset(max(first_step, 0), first)
    for step, allocation in later:
        schedule.schedule(step, allocation)


def restore_speeds(speeds: RateFilter, checkpoint: Checkpoint, world_size: int) -> None:
    """Go on with the saved speeds; of a world of another size they say nothing."""
    if checkpoint.world_size == world_size:
        speeds.restore(checkpoint.speeds)


def _capped(allocation: Allocation, lower: int, caps: tuple[int, ...]) -> Allocation:
    """Under tracking the global batch was decided: what is above one rank's bound goes to the others."""
    sizes = allocation.local_batch_sizes
    if allocation.split == "tracking":
        return allocation.with_sizes(apportion(sum(sizes), sizes, [min(lower, cap) for cap in caps], caps))
    return allocation.with_sizes(tuple(map(min, sizes, caps)))


def restore_noise(average: NoiseAverage, checkpoint: Checkpoint) -> None:
    """Go on with the saved averages."""
    average.trace, average.squared_norm, average.weight = checkpoint.noise
