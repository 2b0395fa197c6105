"""The stored actions of a job, checked against everything else that is known about them.

A broker can lose the end of a stream (a flipped bit in a stored block cuts it off without an error), or run on an old
copy of its files. Deciding on top of that would decide windows again that trainers have applied. So three things are
compared with the stored actions: their own hashes, what this arbitrator wrote or read before, and the trainer's
receipts (`Applied`), which are in another stream.
"""

import contextlib
import logging
from collections.abc import AsyncIterator
from typing import NamedTuple

from dynamix.runtime.bus import Bus, BusMessage
from dynamix.runtime.bus.requests import nanoseconds
from dynamix.schemas import subjects
from dynamix.schemas.chain import BrokenChainError, ChainCheck, is_intact
from dynamix.schemas.codec import MalformedMessageError, decode
from dynamix.schemas.messages import Action, Applied, Job, State
from dynamix.schemas.streams import ACTIONS, FEED

from .fold import MAX_SKIP_WINDOWS

logger = logging.getLogger(__name__)

MOST_DECIDED_MEANWHILE = 256
"""Actions that other arbitrators may store while the actions of a job are read."""


class ActionStoreError(RuntimeError):
    """The stored actions are not those that were written: the arbitrator refuses to decide on top of them.

    Attributes:
        window: the last window whose stored action is consistent, -1 for none.
        known_window: the window that is known to have been decided.
    """

    def __init__(self, text: str, *, window: int, known_window: int) -> None:
        super().__init__(text)
        self.window = window
        self.known_window = known_window


class ActionsEndEarlyError(ActionStoreError):
    """The stored actions end before what is known: they were lost, or a server answered that does not know them yet."""


class Stored(NamedTuple):
    """An action and its sequence in ACTIONS."""

    sequence: int
    action: Action


class Checked(NamedTuple):
    """The stored actions of a job, after their check."""

    newest: Stored | None
    lost_until: int = 0
    """FEED sequence of the receipt for an action of an ACTIONS that was there before this one; 0: none is lost."""


async def newest_action(bus: Bus, job: Job) -> Stored | None:
    """The job's newest action, of any arbitrator.

    Raises:
        ActionStoreError: when it cannot be read, is not as it was written, or cannot be one of this job.
    """
    message = await bus.last(ACTIONS.name, subjects.of("action", job.job))
    if message is None:
        return None
    stored = Stored(message.sequence, _action(message))
    action = stored.action
    if action.generation == job.generation and len(action.local_batch_sizes) != job.world_size:
        raise _refusal(
            stored,
            f"sizes {len(action.local_batch_sizes)} ranks, the job has {job.world_size}: two runs made this "
            "generation; start one again while the broker answers, or under another id",
        )
    if not is_intact(message.payload):
        raise _refusal(stored, "is not as it was written: its hash does not match its content")
    return stored


async def checked_action(bus: Bus, job: Job, known: Stored | None = None) -> Checked:
    """The job's newest action, held against the trainer's receipts and the action known last.

    Raises:
        ActionsEndEarlyError: when it cannot be the newest; one of several servers may say so for 10 s.
        ActionStoreError: as `newest_action`, or when another action is in the place of a known one.
    """
    receipt = await newest_receipt(bus, job)
    newest = await newest_action(bus, job)
    if known is not None:
        await check_goes_on(bus, job, known, newest)
    return Checked(newest, await check_receipt(bus, job, newest, receipt))


async def newest_receipt(bus: Bus, job: Job) -> BusMessage | None:
    """The trainer's newest receipt: what it applied last.

    Read it before the newest action: another arbitrator may decide in between, and a receipt is never ahead of actions
    that were read after it.
    """
    return await bus.last(FEED.name, subjects.of("applied", job.job))


async def check_receipt(bus: Bus, job: Job, newest: Stored | None, message: BusMessage | None) -> int:
    """Check that the action is stored that the trainer's receipt names; read the receipt before the actions.

    Returns 0, or the receipt's sequence where only ACTIONS was made again since: decisions go on behind it.

    Raises:
        ActionsEndEarlyError: when the stored actions end before it.
        ActionStoreError: when another one is in its place.
    """
    receipt = None
    with contextlib.suppress(MalformedMessageError):  # an unreadable receipt is no evidence
        receipt = None if message is None else decode(Applied, message.subject, message.payload)
    if message is None or receipt is None or receipt.generation != job.generation:
        return 0  # trainers refuse actions of an earlier generation, so its loss has no effect
    applied = (receipt.generation, receipt.decided_window)
    stored = (-1, -1) if newest is None else (newest.action.generation, newest.action.window)
    where = f"window {receipt.decided_window} of generation {receipt.generation}"
    if stored < applied and not (newest is None and await _is_older_than_actions(bus, message)):
        if newest is None and nanoseconds((await bus.stream_state(ACTIONS.name)).created) > message.timestamp_ns:
            logger.warning("ACTIONS was made again after the trainer of %s applied the action for %s", job.job, where)
            return message.sequence
        if newest is None and await _began_after(bus, receipt):
            logger.warning(
                "the streams were made again after the trainer of %s applied the action for %s", job.job, where
            )
            return 0
        if await _is_made_up(bus, receipt):
            logger.warning("a receipt of %s is for %s, far beyond what its ranks reported: made up", job.job, where)
            return 0
        raise ActionsEndEarlyError(
            f"{subjects.of('action', job.job)} ends at {_place(newest)}, but the trainer applied an action for {where}"
            ": the broker lost its end, or runs on an old copy of its store",
            window=stored[1],
            known_window=receipt.decided_window,
        )
    if newest is not None and stored == applied and receipt.action_hash not in (b"", newest.action.hash):
        raise _refusal(newest, f"is not the action for {where} that the trainer applied")
    return 0


async def check_goes_on(bus: Bus, job: Job, known: Stored | None, newest: Stored | None) -> None:
    """Check that the stored actions continue after the action known last; `None`: there was none.

    Raises:
        ActionsEndEarlyError: when they end before it.
        ActionStoreError: when they do not chain to it.
    """
    if known is None:
        if newest is not None and newest.action.previous_hash:
            await _check_chain(bus, job, None, newest)
        return
    if newest is None or newest.sequence < known.sequence:
        if newest is None and await _has_dropped(bus, known.sequence):
            return
        raise ActionsEndEarlyError(
            f"{subjects.of('action', job.job)} ends at {_place(newest)}, before our own {known.sequence}: was the "
            "broker's store replaced by an old copy?",
            window=-1 if newest is None else newest.action.window,
            known_window=known.action.window,
        )
    if newest.sequence == known.sequence and newest.action.hash != known.action.hash:
        raise _refusal(newest, "is not the one that was there before")
    if newest.sequence > known.sequence and newest.action.previous_hash != known.action.hash:
        await _check_chain(bus, job, known, newest)


async def _check_chain(bus: Bus, job: Job, known: Stored | None, newest: Stored) -> None:
    """Read all actions after the known one: other arbitrators may have decided several windows."""
    check, start = ChainCheck(), 1 if known is None else known.sequence
    oldest: Stored | None = None
    async for message in _messages(bus, job, start, newest.sequence):
        stored = Stored(message.sequence, _action(message))
        oldest = oldest or stored
        try:
            check.check_next(stored.action, message.payload)
        except BrokenChainError as error:
            raise _refusal(stored, f"breaks the chain: {error}") from error
    if oldest is None:
        raise ActionsEndEarlyError(
            f"{subjects.of('action', job.job)} ends before {start}, but {newest.sequence} was read from it",
            window=-1,
            known_window=newest.action.window,
        )
    if known is None:
        is_ours = not oldest.action.previous_hash
    else:
        is_ours = (oldest.sequence, oldest.action.hash) == (known.sequence, known.action.hash)
    num_kept = ACTIONS.max_messages_per_subject - MOST_DECIDED_MEANWHILE  # each new action drops the job's oldest one
    may_be_gone = check.num_actions >= num_kept or await _has_dropped(bus, start)
    if not is_ours and not may_be_gone:
        raise _refusal(oldest, "begins another chain than the one that was known")


async def _messages(bus: Bus, job: Job, start: int, last: int) -> AsyncIterator[BusMessage]:
    """The job's stored actions from one sequence to another."""
    while start <= last:
        message = await bus.first(ACTIONS.name, subjects.of("action", job.job), start=start)
        if message is None:
            return
        yield message
        start = message.sequence + 1


async def _has_dropped(bus: Bus, sequence: int) -> bool:
    """Whether ACTIONS was full and discarded the message at a sequence; a stream that was made again begins at 1."""
    oldest = await bus.first(ACTIONS.name, subjects.of("action", subjects.ANY))
    return oldest is not None and oldest.sequence > sequence


async def _is_made_up(bus: Bus, receipt: Applied) -> bool:
    """Whether a receipt is for a window that cannot have been decided: far behind what any node reported last.

    What is within reach, only permissions per job can refuse: any trainer may publish it.
    """
    message = await bus.last(FEED.name, subjects.of("state", receipt.job, subjects.ANY))
    if message is None:
        return False
    try:
        newest = decode(State, message.subject, message.payload)
    except MalformedMessageError:
        return False
    return newest.generation == receipt.generation and receipt.decided_window > newest.window + MAX_SKIP_WINDOWS


async def _began_after(bus: Bus, receipt: Applied) -> bool:
    """Whether FEED begins behind the states that the receipt's action was made from: it was made again, with ACTIONS.

    A FEED that is full drops states and receipts of one time together.
    """
    message = await bus.first(FEED.name, subjects.of("state", receipt.job, subjects.ANY))
    if message is None:
        return False
    try:
        oldest = decode(State, message.subject, message.payload)
    except MalformedMessageError:
        return False
    return oldest.generation == receipt.generation and oldest.window > receipt.decided_window


async def _is_older_than_actions(bus: Bus, receipt: BusMessage) -> bool:
    """Whether ACTIONS was full and may have dropped the receipt's action: all that it holds is newer."""
    oldest = await bus.first(ACTIONS.name, subjects.of("action", subjects.ANY))
    return oldest is not None and oldest.sequence > 1 and oldest.timestamp_ns > receipt.timestamp_ns


def _action(message: BusMessage) -> Action:
    try:
        return decode(Action, message.subject, message.payload)
    except MalformedMessageError as error:
        raise ActionStoreError(
            f"{message.subject} at {message.sequence} cannot be read: {error}", window=-1, known_window=-1
        ) from error


def _refusal(stored: Stored, text: str) -> ActionStoreError:
    window = stored.action.window
    return ActionStoreError(
        f"{subjects.of('action', stored.action.job)} at {stored.sequence} {text}",
        window=window - 1,
        known_window=window,
    )


def _place(stored: Stored | None) -> str:
    if stored is None:
        return "nothing"
    return f"{stored.sequence} (window {stored.action.window} of generation {stored.action.generation})"
