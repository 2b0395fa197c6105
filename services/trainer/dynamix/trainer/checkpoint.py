"""The part of a checkpoint that is ours: numbers, lists and tensors, safe for `torch.load(weights_only=True)`."""

import logging
from collections.abc import Sequence
from dataclasses import astuple, replace
from typing import Any

import msgspec
import torch
from msgspec.structs import replace as replace_fields

from dynamix.schemas.apportion import apportion
from dynamix.schemas.messages.allocation import Allocation, is_permitted
from dynamix.trainer.data.plan import Position, ScheduleEntry
from dynamix.trainer.job.identity import merge_caps

from .data.orders import DataIdentity
from .gradient.noise import NoiseAverage
from .job.identity import Attempt, generation_after
from .steering.run import Run

_log = logging.getLogger("dynamix.trainer")

VERSION = 8

Residuals = dict[str, dict[str, torch.Tensor]]
"""Rounding errors of one model on one rank that were not sent yet, by codec and parameter."""


def save(
    run: Run,
    position: Position,
    residuals: Sequence[Residuals] = (),
    outer: Sequence[dict[str, torch.Tensor]] = (),
) -> dict[str, Any]:
    """Save the state that a resumed run needs, as plain containers.

    By model, in the order they are covered: `residuals`, and the momentum of `outer` steps.
    """
    return {
        "version": VERSION,
        "job": run.identity.job,
        "generation": run.identity.generation,
        "attempt": run.identity.attempt._asdict(),
        "data": run.data._asdict(),
        "position": position._asdict(),
        "num_epochs": run.num_epochs,
        "world_size": len(run.options.local_batch_sizes),
        "schedule": [
            [step, *msgspec.to_builtins(allocation)] for step, allocation in run.schedule.entries_since(position.step)
        ],
        "fast_loop": run.fast_loop.state,
        "noise": list(astuple(run.noise)),
        "local_batch_sizes": list(run.options.local_batch_sizes),
        "base_global_batch_size": run.options.base_global_batch_size,
        "memory_caps": list(run.identity.max_local_batch_sizes),
        "decided_by": _policy_of(run),
        "rank": run.place.rank,
        "residuals": list(residuals),
        "outer_momentum": list(outer),
    }


def restore(run: Run, state: dict[str, Any]) -> Position:
    """Go on where `save` returned `state`, in a generation above every one used before; returns its position.

    A world of another size keeps the global batch, divided again among its ranks; their speeds are measured again.
    Where the script itself names other sizes than when it was saved and the global batch is fixed, the new ones count.

    Raises:
        ValueError: when it is of another version, or was saved over other data.
    """
    if state.get("version") != VERSION:
        raise ValueError(f"session state of version {state.get('version')!r}: this program reads version {VERSION}")
    if (data := DataIdentity(**state["data"])) != run.data:
        differing = ", ".join(
            f"{name} {was!r}, now {now!r}"
            for name, was, now in zip(data._fields, data, run.data, strict=True)
            if was != now
        )
        raise ValueError(f"the session state was saved over other data or in another order ({differing}): attach alike")
    position = Position(**state["position"])
    entries = [ScheduleEntry(step, msgspec.convert(parts, Allocation)) for step, *parts in state["schedule"]]
    generation, caps = run.identity.generation, run.identity.max_local_batch_sizes
    if state["job"] == run.identity.job:
        after = generation_after(state["generation"], Attempt(**state["attempt"]), run.identity.attempt)
        generation = max(generation, after)
    if is_same_world := state["world_size"] == len(run.options.local_batch_sizes):
        known = (dict(enumerate(caps)), dict(enumerate(state["memory_caps"])))
        caps = merge_caps(known, len(caps), run.options.max_local_batch_size, run.options.min_local_batch_size)
    run.use_identity(run.identity._replace(generation=generation, max_local_batch_sizes=caps))
    is_same_script = state["local_batch_sizes"] == list(run.options.local_batch_sizes)
    if not is_same_world or is_same_script:
        run.options = replace(run.options, base_global_batch_size=state["base_global_batch_size"])
    if is_same_world and (is_same_script or run.options.global_batch == "adaptive"):
        _restore_schedule(run, entries, is_same_policy=state["decided_by"] == _policy_of(run))
    else:
        saved = run.options.local_batch_sizes if is_same_world else entries[0].allocation.local_batch_sizes
        now, caps, lower = run.schedule.newest, run.identity.max_local_batch_sizes, run.options.min_local_batch_size
        sizes = apportion(sum(saved), now.local_batch_sizes, [min(lower, cap) for cap in caps], caps)
        run.schedule.reset(position.step, now.with_sizes(sizes))
    if is_same_world:
        run.fast_loop.restore(state["fast_loop"])
    run.noise = NoiseAverage(*state["noise"])
    run.num_epochs = state["num_epochs"]
    return position


def residuals_of(run: Run, state: dict[str, Any], step: int) -> list[Residuals]:
    """The saved residuals, by model; none if another rank saved them or another codec is active.

    Every rank has its own: one that loads what another saved begins without, which loses a fraction of one gradient.
    """
    codec = run.schedule.allocation_at(step).exchange.codec
    of_this = state["rank"] == run.place.rank and state["world_size"] == len(run.options.local_batch_sizes)
    saved: list[Residuals] = state["residuals"] if of_this else []
    return [{name: parts for name, parts in each.items() if name == codec} for each in saved]


def outer_momentum_of(run: Run, state: dict[str, Any], step: int) -> list[dict[str, torch.Tensor]]:
    """The saved momentum of outer steps, by model; equal on all ranks, and `None` without outer steps."""
    has_momentum = run.schedule.allocation_at(step).exchange.outer_momentum > 0
    saved: list[dict[str, torch.Tensor]] = state["outer_momentum"] if has_momentum else []
    return saved


def _policy_of(run: Run) -> list[Any]:
    """The policy of the job, and its options."""
    return [run.options.policy, dict(run.options.policy_options)]


def _restore_schedule(run: Run, saved: list[ScheduleEntry], *, is_same_policy: bool) -> None:
    """Restore the saved sizes, none above its rank's bound.

    The split is that of the job now, which may have another policy, or a hook that cannot carry times. So is the
    exchange, unless the same policy had decided otherwise and the job still permits it.
    """
    now, caps, options = run.schedule.newest, run.identity.max_local_batch_sizes, run.options

    def restored(saved: Allocation) -> Allocation:
        allocation = now.with_sizes(saved.local_batch_sizes)
        keeps = is_same_policy and options.fixed_exchange is None and options.supports_exchange
        if keeps and is_permitted(saved.exchange, options.exchange, options.named_codecs):
            allocation = replace_fields(allocation, exchange=saved.exchange)
        return run.bounded(allocation, caps)

    (first_step, first), *later = [(step, restored(allocation)) for step, allocation in saved]
    run.schedule.reset(max(first_step, 0), first)
    for step, allocation in later:
        run.schedule.revise(step, allocation)


def warn_of_missing_state(run: Run, *, from_snapshot: bool) -> None:
    """Warn if a script resumes its model and optimizer (`from_snapshot`), but not its session."""
    if run.place.rank != 0:
        return
    generation, job = run.identity.generation, run.identity.job
    what = f"start {generation} of job {job} follows an earlier one" if generation else ""
    if from_snapshot:
        what = "the optimizer has made steps already"
    if what:
        is_new_run = generation and not from_snapshot and not run.identity.attempt.restarts
        _log.warning(
            "%s, %s this session begins at epoch 0 with sample 0%s: if the model comes from a snapshot, save "
            "session.state_dict() in it, and call session.load_state_dict(...) on all ranks before the first batch",
            what,
            "and" if is_new_run else "but",
            ", as a new run under an id that was used before should" if is_new_run else "",
        )
