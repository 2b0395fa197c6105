"""The part of a checkpoint that is ours: plain numbers and lists, safe for `torch.load(weights_only=True)`."""

from typing import Any, NamedTuple

from .identity import Attempt
from .noise import NoiseAverage
from .sampler import Position
from .schedule import Schedule

VERSION = 2


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
    schedule: list[tuple[int, tuple[int, ...]]]
    """The sizes in force at the position, and those already adopted for later."""
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
        "schedule": [[step, list(sizes)] for step, sizes in checkpoint.schedule],
        "noise": list(checkpoint.noise),
        "memory_caps": list(checkpoint.memory_caps),
    }


def parse(state: dict[str, Any], data: DataIdentity) -> Checkpoint:
    """The checkpoint in what `dump` returned.

    Raises:
        ValueError: when it is of another version, or was saved over other data.
    """
    if state.get("version") != VERSION:
        raise ValueError(f"session state of version {state.get('version')!r}, this program reads {VERSION}")
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
        schedule=[(step, tuple(sizes)) for step, sizes in state["schedule"]],
        noise=tuple(state["noise"]),
        memory_caps=tuple(state["memory_caps"]),
    )


def restore_schedule(schedule: Schedule, checkpoint: Checkpoint, caps: tuple[int, ...]) -> None:
    """Put the saved sizes in force, none above its rank's bound. A world of another size starts with its own sizes."""
    step = checkpoint.position.step
    entries = checkpoint.schedule if checkpoint.world_size == len(caps) else [(step, schedule.at(0).values)]
    capped = [(at, tuple(min(pair) for pair in zip(sizes, caps, strict=True))) for at, sizes in entries]
    schedule.reset(max(capped[0][0], 0), capped[0][1])
    for at, sizes in capped[1:]:
        schedule.add(at, sizes)


def restore_noise(average: NoiseAverage, checkpoint: Checkpoint) -> None:
    """Go on with the saved averages."""
    average.trace, average.squared_norm, average.weight = checkpoint.noise
