"""A job's decisions on the bus, and its family's profile: checks stored actions, folds states, publishes.

A broker can lose the end of a stream (a flipped bit in a stored block cuts it off without an error), or run on an old
copy of its files. Deciding on top of that would decide windows again that trainers have applied. So three things are
compared with the stored actions: their own hashes, what this arbitrator wrote or read before, and the trainer's
receipts (`Applied`), which are in another stream.
"""

import asyncio
import logging
from typing import Any, NamedTuple, Self

from dynamix.arbitrator.learned.policy_store import PolicyAbsentError, PolicyStore
from dynamix.arbitrator.policies.baselines import Static
from dynamix.arbitrator.policies.policy import MISTAKES, Policy, digest_of
from dynamix.arbitrator.policies.registry import POLICIES
from dynamix.arbitrator.policies.rule import Rule
from dynamix.runtime.bus import (
    Bus,
    BusMessage,
    FailoverWait,
    PermissionDeniedError,
    StaleWriterError,
    StreamMissingError,
    StreamState,
)
from dynamix.runtime.bus.requests import nanoseconds
from dynamix.runtime.service import Context
from dynamix.schemas import subjects
from dynamix.schemas.chain import BrokenChainError, ChainCheck, is_intact
from dynamix.schemas.codec import MalformedMessageError, decode, decode_or_none, encode
from dynamix.schemas.messages import MAX_PROFILE_BYTES, Action, Applied, Job, JobProfile, State
from dynamix.schemas.streams import ACTIONS, FEED, JOBS, PROFILES

from .fold import Fold
from .signatures import SizeWatch

logger = logging.getLogger(__name__)

MOST_DECIDED_MEANWHILE = 256
"""Actions that other arbitrators may store while the actions of a job are read."""
SHOW_WAITS_S = (0.05, 0.1, 0.2, 0.4, 0.8)
"""Waits before the newest action is read again: a broker may refuse for an action that it shows a moment later."""


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
    """The stored actions end early: some were lost, or a server answered that does not have them yet."""


HALTING_ERRORS = (ActionStoreError, *MISTAKES)
"""Errors of a policy, or of a job's stored actions. They halt one generation of that job and no other job; an error of
the bus ends the process, and a restart fixes it."""


class Stored(NamedTuple):
    """An action and its sequence in ACTIONS."""

    sequence: int
    action: Action


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


async def checked_action(bus: Bus, job: Job, known: Stored | None = None) -> tuple[Stored | None, int]:
    """The job's newest action, held against the trainer's receipts and the action known last.

    Also the FEED sequence of the receipt behind which decisions continue, where ACTIONS was made again; else 0.

    Raises:
        ActionsEndEarlyError: when it cannot be the newest; one of several servers may answer so for 10 s.
        ActionStoreError: as `newest_action`, or when another action is in the place of a known or applied one.
    """
    # The receipt first: it is never ahead of actions that are read after it, which others may store meanwhile.
    message = await bus.last(FEED.name, subjects.of("applied", job.job))
    newest = await newest_action(bus, job)
    if known is not None:
        await check_goes_on(bus, job, known, newest)
    # an unreadable receipt is no evidence
    receipt = None if message is None else decode_or_none(Applied, message.subject, message.payload)
    if message is None or receipt is None or receipt.generation != job.generation:
        return newest, 0  # trainers refuse actions of an earlier generation, so its loss has no effect
    applied = (receipt.generation, receipt.decided_window)
    stored = (-1, -1) if newest is None else (newest.action.generation, newest.action.window)
    where = f"window {receipt.decided_window} of generation {receipt.generation}"
    if stored < applied:
        if newest is None and (lost_until := await _made_again(bus, job, message, receipt)) is not None:
            return None, lost_until
        raise ActionsEndEarlyError(
            f"{subjects.of('action', job.job)} ends at {_place(newest)}, but the trainer applied an action for {where}"
            ": the broker lost its end, or runs on an old copy of its store",
            window=stored[1],
            known_window=receipt.decided_window,
        )
    if newest is not None and stored == applied and receipt.action_hash not in (b"", newest.action.hash):
        raise _refusal(newest, f"is not the action for {where} that the trainer applied")
    return newest, 0


async def _made_again(bus: Bus, job: Job, message: BusMessage, receipt: Applied) -> int | None:
    """Where decisions continue although a job with a receipt has no action; `None`: nowhere, the actions were lost."""
    oldest = await bus.first(ACTIONS.name, subjects.of("action", subjects.ANY))
    if oldest is not None and oldest.sequence > 1 and oldest.timestamp_ns > message.timestamp_ns:
        return 0  # ACTIONS was full, and may have dropped the action: all that it holds is newer
    if nanoseconds((await bus.stream_state(ACTIONS.name)).created) > message.timestamp_ns:
        logger.warning("ACTIONS was made again after the trainer of %s applied its last action", job.job)
        return message.sequence
    # FEED was made again with ACTIONS if it begins behind the states that the receipt's action was made from; a full
    # one drops states and receipts of one time together
    first = await bus.first(FEED.name, subjects.of("state", job.job, subjects.ANY))
    state = None if first is None else decode_or_none(State, first.subject, first.payload)
    if state is None or state.generation != receipt.generation or state.window <= receipt.decided_window:
        return None
    logger.warning("the streams were made again after the trainer of %s applied its last action", job.job)
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
    at = start
    while at <= newest.sequence:
        message = await bus.first(ACTIONS.name, subjects.of("action", job.job), start=at)
        if message is None:
            break
        at = message.sequence + 1
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


async def _has_dropped(bus: Bus, sequence: int) -> bool:
    """Whether ACTIONS was full and discarded the message at a sequence; a stream that was made again begins at 1."""
    oldest = await bus.first(ACTIONS.name, subjects.of("action", subjects.ANY))
    return oldest is not None and oldest.sequence > sequence


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


class JobLog:
    """The fold of one generation of a job, joined to its subject in ACTIONS; made by `open`."""

    def __init__(
        self, job: Job, policy: Policy, context: Context[Any], policies: PolicyStore, profile: bytes = b""
    ) -> None:
        self.job = job
        self.known: Stored | None = None
        """The newest action that this process wrote or read."""
        self.actions_created = ""
        """When the ACTIONS was made that it is in; empty: not known."""
        self._context = context
        self._policies = policies
        self._log = context.log.bind(job=job.job, generation=job.generation)
        self._superseded = False
        self._has_begun = False
        """Whether a state was folded."""
        self.fold = Fold(job, policy, None, profile)
        self.watch = None if job.policy == Static.name else SizeWatch(job)  # static sizes are not stuck

    @classmethod
    async def open(cls, job: Job, context: Context[Any], policies: PolicyStore, known: Stored | None = None) -> Self:
        """Start from the job's newest action, with its policy; a generation without actions chooses its policy here.

        `known` is the newest action that this process knows of the job's earlier generations.

        Raises:
            ActionsEndEarlyError: when it cannot be the newest; one of several servers may say so for 10 s.
            ActionStoreError: when it cannot be one of this job.
            ValueError: when there is no such policy, or not any more.
        """
        newest, lost_until = await checked_action(context.bus, job, known)
        recorded = _of_generation(newest, job)
        policy = await policies.choose(job, recorded)
        profile = b"" if recorded is not None else await _profile_for(job, policy, context)
        opened = cls(job, policy, context, policies, profile)
        if newest is not None:
            opened._adopt(newest)
        if lost_until:
            opened.fold.start_after_gap(lost_until)
            opened._has_begun = True
        opened._log.info("decides", policy=job.policy, version=opened.fold.policy.version)
        return opened

    @property
    def has_inputs(self) -> bool:
        """Whether it continues after states that were decided before."""
        return self.fold.next_window > 0

    def check_inputs(self, feed: StreamState) -> None:
        """Continue after a gap if FEED no longer holds what follows the watermark.

        A watermark behind FEED's end belongs to another FEED: the stream was made again.
        """
        if self.has_inputs and not feed.first_sequence - 1 <= self.fold.watermark <= feed.last_sequence:
            held = {"first_sequence": feed.first_sequence, "last_sequence": feed.last_sequence}
            self._log.warning("inputs after the checkpoint are gone", watermark=self.fold.watermark, **held)
            self.fold.start_after_gap(max(0, feed.first_sequence - 1))

    async def add_state(self, sequence: int, state: State) -> None:
        """Fold one state and publish every decision that it makes possible.

        Raises:
            ActionStoreError: when the stored actions are not those that this process wrote.
            ValueError: when another arbitrator decided first, by a policy that is not there.
        """
        if state.window and not self._has_begun and not self.has_inputs:
            # no action is stored, nor the states that one would be made from: the streams were made again meanwhile
            self.fold.start_after_gap(sequence - 1)
        self._has_begun = True
        self.fold.add_state(sequence, state)
        while not self._superseded and (action := self.fold.close()) is not None:
            if (stored_at := await self._store(action)) is not None:
                self.known = Stored(stored_at, action)
                self.fold.adopt(action)
                self._context.count("decided")
                if self.fold.note:
                    self._log.info(self.fold.note, family=self.job.family, window=action.window)
                self._log.debug("decided", window=action.window, local_batch_sizes=action.local_batch_sizes[:16])
                # a restarted arbitrator counts windows from zero
                finding = None if self.watch is None else self.watch.observe_sizes(action.local_batch_sizes)
                if finding is not None:
                    self._context.count("size_stuck")
                    self._log.warning(finding.explanation, signature=finding.signature, window=action.window)
                    event = finding.event(action.job, action.generation, action.window, "arbitrator")
                    await self._context.bus.publish_soon(event)

    async def _store(self, action: Action) -> int | None:
        """Store an action; `None` when another arbitrator's is there, which is adopted.

        A server that was cut off refuses what follows the actions that it does not know: then both are tried again.
        """
        bus, expected_last = self._context.bus, 0 if self.known is None else self.known.sequence
        wait = FailoverWait(bus.stream_state, FEED.name)
        while True:
            try:
                return await bus.publish_next(action, expected_last=expected_last)
            except StaleWriterError as refusal:
                try:
                    newest = await self._decided_by_another(expected_last, refusal)
                    break
                except ActionsEndEarlyError:
                    if not await wait.pause():
                        raise
        if newest is None:
            self.known = None
            return None
        recorded, policy = _of_generation(newest, self.job), self.fold.policy
        ours = (policy.version, digest_of(policy))
        while recorded is not None and (recorded.policy_version, recorded.policy_digest) != ours:
            try:
                self.fold.policy = await self._policies.choose(self.job, recorded)
                break
            except PolicyAbsentError:  # its file may be newer than what the server that answers knows
                if not await wait.pause():
                    raise
        self._adopt(newest)
        return None

    async def _decided_by_another(self, expected_last: int, refusal: StaleWriterError) -> Stored | None:
        """The newest stored action, because of which ours was refused; `None` if our own was dropped to make room.

        The leader of a cluster may refuse because of an action that it is about to store; a broker with a damaged disk
        may refuse because of one that it can no longer read.
        """
        for wait_s in (*SHOW_WAITS_S, None):
            newest = await newest_action(self._context.bus, self.job)
            await check_goes_on(self._context.bus, self.job, self.known, newest)
            if (0 if newest is None else newest.sequence) != expected_last:
                return newest
            if wait_s is not None:
                await asyncio.sleep(wait_s)
        window = -1 if newest is None else newest.action.window
        raise ActionsEndEarlyError(
            f"the broker refuses an action for one that it does not show: {refusal}", window=window, known_window=window
        )

    def _adopt(self, stored: Stored) -> None:
        self._superseded = stored.action.generation > self.job.generation
        self.fold.adopt(stored.action)
        self.known = stored
        self._context.count("adopted")
        self._log.info("adopted a stored action", window=stored.action.window, of_generation=stored.action.generation)


def _of_generation(stored: Stored | None, job: Job) -> Action | None:
    """The action, if it is of this generation."""
    return stored.action if stored is not None and stored.action.generation == job.generation else None


def reason_of(error: Exception) -> tuple[str, Exception | None]:
    """The text of the error, and the error itself where it is unexpected and its traceback is wanted."""
    is_foreseen = isinstance(error, (ActionStoreError, ValueError))
    return (str(error), None) if is_foreseen else (repr(error), error)


# --- profiles: what runs of a job family taught ----------------------------------------------------------------------
#
# A profile names the sequence in JOBS of the end that it was made for; an end behind it is not in it yet. So the newest
# specifications are all that a restarted arbitrator looks at, and two arbitrators write by compare-and-set.


async def _profile_for(job: Job, policy: Policy, context: Context[Any]) -> bytes:
    """The stored profile that a generation without decisions begins with; empty for none, or an unusable one."""
    if not job.family or not isinstance(policy, Rule):
        return b""
    log = context.log.bind(job=job.job, generation=job.generation, family=job.family)
    if job.explores and job.generation > 0:
        log.warning("a start again tries nothing out and leaves no record of it: give each run an id of its own")
    reason = ""
    try:
        stored = await context.bus.last(PROFILES.name, subjects.of("profile", job.family))
        if stored is None:
            return b""
        payload = stored.payload
        profile = decode(JobProfile, stored.subject, payload)
        policy.begin(job, profile)
        if len(payload) > MAX_PROFILE_BYTES:
            reason = f"it has {len(payload)} bytes, at most {MAX_PROFILE_BYTES} go into an action"
    except (StreamMissingError, PermissionDeniedError) as error:
        reason = str(error)
    except MalformedMessageError as error:
        reason = f"it cannot be read: {error}"
    except MISTAKES as error:
        reason = f"policy {policy.name!r} cannot read its memory: {error!r}"
    if reason:
        context.count("profiles_ignored")
        log.warning("the profile of the family is not used", reason=reason)
        return b""
    if profile.is_forgotten:
        return b""
    context.count("begun_with_profile")
    log.info("begins with the profile of its family", run=profile.run, of=profile.job)
    return payload


async def store_profiles(context: Context[Any]) -> None:
    """Store what a run taught after every end, those of the past first, until the intake ends.

    Once per end, whichever arbitrator comes first, and after a restart.
    """
    wanted = [subjects.of("job", subjects.ANY)]
    async with context.bus.consume(JOBS.name, wanted, start="last_per_subject") as consumer:
        async for batch in consumer:
            for message in batch:
                job = decode_or_none(Job, message.subject, message.payload)  # set aside where it is read for decisions
                if job is not None and job.phase == "ended" and job.family:
                    await _record(context, job, message.sequence)


async def _record(context: Context[Any], job: Job, sequence: int) -> None:
    log = context.log.bind(job=job.job, family=job.family)
    wait = FailoverWait(context.bus.stream_state, JOBS.name)
    try:
        while True:
            try:
                reason = await _store(context, job, sequence, wait)
                break
            except ActionsEndEarlyError:  # of several servers one that was cut off may show older actions
                if not await wait.pause():
                    raise
            except StaleWriterError:  # another arbitrator was first, or that server showed an older profile
                await wait.pause()
    except (ActionStoreError, PermissionDeniedError, StreamMissingError) as error:
        log.warning("what the run taught is not stored", reason=str(error))
    except MISTAKES as error:
        log.error("what the run taught is not stored", reason=repr(error), exc_info=error)
    else:
        if reason:
            log.info("the run taught nothing for its family", reason=reason)


async def _store(context: Context[Any], job: Job, sequence: int, wait: FailoverWait) -> str:
    """Store the profile after a run, unless there is one; why there is nothing to store, if there is not."""
    bus, subject = context.bus, subjects.of("profile", job.family)
    stored, earlier = await bus.last(PROFILES.name, subject), None
    if stored is not None:
        try:
            earlier = decode(JobProfile, subject, stored.payload)
        except MalformedMessageError as error:
            context.log.warning("a broken profile is replaced", family=job.family, reason=str(error))
    if earlier is not None and earlier.ended_sequence >= sequence:
        last = (await bus.stream_state(JOBS.name)).last_sequence
        while earlier.ended_sequence > last and await wait.pause():
            last = (await bus.stream_state(JOBS.name)).last_sequence
        if earlier.ended_sequence <= last:  # else its sequence is of another JOBS: the stream was made again
            return ""
    newest, _ = await checked_action(bus, job)
    if newest is None or newest.action.generation != job.generation:
        return "nothing was decided in its last start"
    policy: Policy | None = POLICIES.get(newest.action.policy)
    if not isinstance(policy, Rule) or policy.version != newest.action.policy_version:
        return f"policy {newest.action.policy!r} keeps nothing for later runs"
    known = None if earlier is None or earlier.is_forgotten else earlier
    profile = policy.profile_after(job, newest.action, known, ended_sequence=sequence)
    if profile is None:
        return f"{newest.action.window + 1} windows, and nothing measured in them"
    if (num_bytes := len(encode(profile))) > MAX_PROFILE_BYTES:
        reason = f"{num_bytes} bytes are over the limit of {MAX_PROFILE_BYTES}"
        context.log.warning("what the run taught is not stored", job=job.job, family=job.family, reason=reason)
        return ""
    await bus.publish_next(profile, expected_last=0 if stored is None else stored.sequence)
    context.count("profiles_stored")
    context.log.info("stored what the run taught", job=job.job, family=job.family, run=profile.run)
    return ""
