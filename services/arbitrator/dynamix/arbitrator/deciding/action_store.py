"""A job's actions as the broker has them, held against everything else that is known of them.

A broker can lose the end of a stream (a flipped bit in a stored block cuts it off in silence), or stand on an old copy
of its store. Deciding on top of that would decide windows again that trainers have applied, so the log is believed only
as far as nothing contradicts it: its own hashes, what this arbitrator wrote or read before, and what the trainer says
it applied, which stands in another stream.
"""

from asyncio import Future
from collections.abc import AsyncIterator
from typing import NamedTuple, Protocol

from dynamix.runtime.bus import BusMessage
from dynamix.schemas import subjects
from dynamix.schemas.chain import BrokenChainError, ChainCheck, is_intact
from dynamix.schemas.codec import MalformedMessageError, decode
from dynamix.schemas.messages import Action, Applied, Event, Job
from dynamix.schemas.streams import ACTIONS, FEED

MOST_DECIDED_MEANWHILE = 256
"""Actions that others may store while a log is read."""


class ActionStore(Protocol):
    """What of the bus a job's decisions need."""

    async def last(self, stream: str, subject: str) -> BusMessage | None:
        """The newest message on a subject."""

    async def first(self, stream: str, subject: str, *, start: int = 1) -> BusMessage | None:
        """The oldest message on a subject at or after a sequence."""

    async def publish_action(self, action: Action, *, expected_last: int) -> int:
        """Store an action if the job's newest one has the sequence `expected_last`."""

    async def publish_soon(self, message: Event) -> Future[int]:
        """Send an event; errors are the bus's to log."""


class ActionStoreError(RuntimeError):
    """The log of actions is not the one that was written: the arbitrator refuses to decide on top of it.

    Attributes:
        window: the last window that the log can be believed for, -1 for none.
        known_window: the window that is known to have been decided.
    """

    def __init__(self, text: str, *, window: int, known_window: int) -> None:
        super().__init__(text)
        self.window = window
        self.known_window = known_window


class Stored(NamedTuple):
    """An action, and where it stands in ACTIONS."""

    sequence: int
    action: Action


async def newest_action(bus: ActionStore, job: Job) -> Stored | None:
    """The job's newest action, whoever wrote it.

    Raises:
        ActionStoreError: when it cannot be read, is not as it was written, or cannot be one of this job.
    """
    message = await bus.last(ACTIONS.name, subjects.action(job.job))
    if message is None:
        return None
    stored = Stored(message.sequence, _action(message))
    action = stored.action
    if action.generation == job.generation and len(action.local_batch_sizes) != job.world_size:
        raise _refusal(
            stored,
            f"sizes {len(action.local_batch_sizes)} ranks, the job has {job.world_size}: an id serves one run, start "
            "this one under another",
        )
    if not is_intact(message.payload):
        raise _refusal(stored, "is not as it was written: its hash is another")
    return stored


async def newest_receipt(bus: ActionStore, job: Job) -> BusMessage | None:
    """What the trainer says it applied last.

    Read it before the newest action: another arbitrator may decide in between, and no receipt is ahead of a log that
    was read after it.
    """
    return await bus.last(FEED.name, subjects.applied(job.job))


async def check_receipt(bus: ActionStore, job: Job, newest: Stored | None, message: BusMessage | None) -> None:
    """See that the log holds what the trainer says it applied, in a receipt that was read before the log.

    Where a recorded job is decided anew there are no receipts: those of the recording are of other actions.

    Raises:
        ActionStoreError: when the log ends before that, or has another action in its place.
    """
    if message is None:
        return
    try:
        receipt = decode(Applied, message.subject, message.payload)
    except MalformedMessageError:
        return  # whoever may publish it says nothing: no evidence
    if receipt.generation != job.generation:
        return  # what an earlier generation lost is past: trainers refuse its actions anyway
    applied = (receipt.generation, receipt.decided_window)
    stored = (-1, -1) if newest is None else (newest.action.generation, newest.action.window)
    where = f"window {receipt.decided_window} of generation {receipt.generation}"
    if stored < applied and not (newest is None and await _is_older_than_the_log(bus, message)):
        raise ActionStoreError(
            f"{subjects.action(job.job)} ends at {_place(newest)}, but the trainer applied an action for {where}: the "
            "broker lost its end, or stands on an old copy of its store",
            window=stored[1],
            known_window=receipt.decided_window,
        )
    if newest is not None and stored == applied and receipt.action_hash not in (b"", newest.action.hash):
        raise _refusal(newest, f"is not the action for {where} that the trainer applied")


async def check_goes_on(bus: ActionStore, job: Job, known: Stored | None, newest: Stored | None) -> None:
    """See that the log goes on from the action that was known last; `None` is a log that was empty.

    Raises:
        ActionStoreError: when it ends before that, or does not chain to it.
    """
    if known is None:
        if newest is not None and newest.action.previous_hash:
            await _check_chain(bus, job, None, newest)
        return
    if newest is None or newest.sequence < known.sequence:
        if newest is None and await _has_given_up(bus, known.sequence):
            return
        raise ActionStoreError(
            f"{subjects.action(job.job)} ends at {_place(newest)}, before our own {known.sequence}: was the broker's "
            "store replaced by an old copy?",
            window=-1 if newest is None else newest.action.window,
            known_window=known.action.window,
        )
    if newest.sequence == known.sequence and newest.action.hash != known.action.hash:
        raise _refusal(newest, "is not the one that stood there before")
    if newest.sequence > known.sequence and newest.action.previous_hash != known.action.hash:
        await _check_chain(bus, job, known, newest)


async def _check_chain(bus: ActionStore, job: Job, known: Stored | None, newest: Stored) -> None:
    """Read all that came after what was known: other arbitrators may have decided several windows."""
    check, start = ChainCheck(), 1 if known is None else known.sequence
    oldest: Stored | None = None
    async for message in _messages(bus, job, start, newest.sequence):
        stored = Stored(message.sequence, _action(message))
        oldest = oldest or stored
        try:
            check.add(stored.action, message.payload)
        except BrokenChainError as error:
            raise _refusal(stored, f"breaks the chain: {error}") from error
    assert oldest is not None, "the newest action is in its own log"
    if known is None:
        is_ours = not oldest.action.previous_hash
    else:
        is_ours = (oldest.sequence, oldest.action.hash) == (known.sequence, known.action.hash)
    num_kept = ACTIONS.max_messages_per_subject - MOST_DECIDED_MEANWHILE  # each new action drops the job's oldest one
    may_be_gone = check.num_actions >= num_kept or await _has_given_up(bus, start)
    if not is_ours and not may_be_gone:
        raise _refusal(oldest, "begins another chain than the one that was known")


async def _messages(bus: ActionStore, job: Job, start: int, last: int) -> AsyncIterator[BusMessage]:
    """The job's stored actions from one sequence to another."""
    while start <= last:
        message = await bus.first(ACTIONS.name, subjects.action(job.job), start=start)
        if message is None:
            return
        yield message
        start = message.sequence + 1


async def _has_given_up(bus: ActionStore, sequence: int) -> bool:
    """Whether ACTIONS was full and has dropped what stood at a sequence; a stream that was made anew begins at 1."""
    oldest = await bus.first(ACTIONS.name, subjects.action(subjects.ANY))
    return oldest is not None and oldest.sequence > sequence


async def _is_older_than_the_log(bus: ActionStore, receipt: BusMessage) -> bool:
    """Whether ACTIONS was full and may have dropped the action before the receipt: all that it holds is newer."""
    oldest = await bus.first(ACTIONS.name, subjects.action(subjects.ANY))
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
        f"{subjects.action(stored.action.job)} at {stored.sequence} {text}", window=window - 1, known_window=window
    )


def _place(stored: Stored | None) -> str:
    if stored is None:
        return "nothing"
    return f"{stored.sequence} (window {stored.action.window} of generation {stored.action.generation})"
