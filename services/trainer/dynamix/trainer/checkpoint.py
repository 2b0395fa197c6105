"""The part of a checkpoint that is ours: numbers, lists and tensors, safe for `torch.load(weights_only=True)`."""

import logging
from collections.abc import Sequence
from dataclasses import astuple, replace
from typing import Any

import msgspec
from msgspec.structs import replace as replace_fields

from dynamix.schemas.apportion import apportion
from dynamix.schemas.messages.allocation import Allocation, is_permitted

from .data.loader import Loader
from .data.orders import DataIdentity
from .data.plan import Position
from .exchange.plan import ModelExchange
from .gradient.noise import NoiseAverage
from .job.identity import Attempt, generation_after, merge_caps
from .local_steps import LocalSteps
from .steering.run import Run

_log = logging.getLogger("dynamix.trainer")

VERSION = 8


def save(run: Run, loader: Loader, exchanges: Sequence[ModelExchange], local: LocalSteps) -> dict[str, Any]:
    """Save the state that a resumed run needs, as plain containers; `exchanges` are of each covered model."""
    position = loader.position
    return {
        "version": VERSION,
        "job": run.identity.job,
        "generation": run.identity.generation,
        "attempt": run.identity.attempt._asdict(),
        "data": run.data._asdict(),
        "position": position._asdict(),
        "order": loader.order_digest,
        "num_epochs": run.num_epochs,
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
        "residuals": [each.residuals() for each in exchanges],
        "outer_momentum": list(local.outer_momentum()),
    }


def restore(
    run: Run, state: dict[str, Any], loader: Loader, exchanges: Sequence[ModelExchange], local: LocalSteps
) -> None:
    """Go on where `save` returned `state`, in a generation above every one used before.

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
    generation, caps = run.identity.generation, run.identity.max_local_batch_sizes
    if state["job"] == run.identity.job:
        after = generation_after(state["generation"], Attempt(**state["attempt"]), run.identity.attempt)
        generation = max(generation, after)
    if is_same_world := len(state["local_batch_sizes"]) == len(run.options.local_batch_sizes):
        known = (dict(enumerate(caps)), dict(enumerate(state["memory_caps"])))
        caps = merge_caps(known, len(caps), run.options.max_local_batch_size, run.options.min_local_batch_size)
    run.use_identity(run.identity._replace(generation=generation, max_local_batch_sizes=caps))
    is_same_script = state["local_batch_sizes"] == list(run.options.local_batch_sizes)
    if not is_same_world or is_same_script:
        run.options = replace(run.options, base_global_batch_size=state["base_global_batch_size"])
    _restore_schedule(run, state, position.step, is_same_world=is_same_world, is_same_script=is_same_script)
    if is_same_world:
        run.fast_loop.restore(state["fast_loop"])
    run.noise = NoiseAverage(*state["noise"])
    run.num_epochs = state["num_epochs"]
    loader.go_to(position, state["order"])
    active = run.schedule.allocation_at(position.step).exchange
    if is_same_world and state["rank"] == run.place.rank:  # residuals differ between ranks; others begin without
        for exchange, residuals in zip(exchanges, state["residuals"], strict=False):
            exchange.load_residuals({name: parts for name, parts in residuals.items() if name == active.codec})
    if active.outer_momentum > 0:
        local.load_outer_momentum(state["outer_momentum"])


def _policy_of(run: Run) -> list[Any]:
    """The policy of the job, and its options."""
    return [run.options.policy, dict(run.options.policy_options)]


def _restore_schedule(run: Run, state: dict[str, Any], step: int, *, is_same_world: bool, is_same_script: bool) -> None:
    """Restore the saved sizes, none above its rank's bound; elsewhere keep their sum, or take the script's new sizes.

    The split is that of the job now, which may have another policy, or a hook that cannot carry times. So is the
    exchange, unless the same policy had decided otherwise and the job still permits it.
    """
    now, caps, options = run.schedule.newest, run.identity.max_local_batch_sizes, run.options
    entries = [(step, msgspec.convert(parts, Allocation)) for step, *parts in state["schedule"]]
    if not is_same_world or not (is_same_script or options.global_batch == "adaptive"):
        saved = options.local_batch_sizes if is_same_world else entries[0][1].local_batch_sizes
        lower = [min(options.min_local_batch_size, cap) for cap in caps]
        run.schedule.reset(step, now.with_sizes(apportion(sum(saved), now.local_batch_sizes, lower, caps)))
        return
    keeps = state["decided_by"] == _policy_of(run) and options.supports_exchange

    def restored(saved: Allocation) -> Allocation:
        allocation = now.with_sizes(saved.local_batch_sizes)
        if keeps and is_permitted(saved.exchange, options.exchange, options.named_codecs):
            allocation = replace_fields(allocation, exchange=saved.exchange)
        return run.bounded(allocation, caps)

    (first_step, first), *later = [(step, restored(allocation)) for step, allocation in entries]
    run.schedule.reset(max(first_step, 0), first)
    for later_step, allocation in later:
        run.schedule.revise(later_step, allocation)


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
