"""A job's decisions on the bus: folds states, publishes actions by compare-and-set, adopts another arbitrator's."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from structlog.stdlib import BoundLogger

from dynamix.arbitrator.families.source import ProfileSource
from dynamix.arbitrator.learned.policy_source import PolicyAbsentError, PolicySource
from dynamix.arbitrator.policies.policy import MISTAKES, Policy, digest_of
from dynamix.arbitrator.policies.static import Static
from dynamix.runtime.bus import Bus, FailoverWait, StaleWriterError, StreamState
from dynamix.schemas.messages import Action, Event, Job, State
from dynamix.schemas.streams import FEED

from .action_store import (
    ActionsEndEarlyError,
    ActionStoreError,
    Stored,
    check_goes_on,
    checked_action,
    newest_action,
)
from .fold import Fold
from .signatures import SizeWatch

HALTING_ERRORS = (ActionStoreError, *MISTAKES)
"""Errors of a policy, or of a job's stored actions. They halt one generation of that job and no other job; an error of
the bus ends the process, and a restart fixes it."""
MAX_EXPLANATION = 1024
SHOW_WAITS_S = (0.05, 0.1, 0.2, 0.4, 0.8)
"""Waits before the newest action is read again: a broker may refuse for an action that it shows a moment later."""


@dataclass(frozen=True)
class Surroundings:
    """Shared by all jobs of an arbitrator: the bus, the policies, the log and the counters."""

    bus: Bus
    policies: PolicySource
    profiles: ProfileSource
    log: BoundLogger
    count: Callable[[str], None]


class JobLog:
    """The fold of one generation of a job, joined to its subject in ACTIONS; made by `open`."""

    def __init__(self, job: Job, policy: Policy, around: Surroundings, profile: bytes = b"") -> None:
        self.job = job
        self.known: Stored | None = None
        """The newest action that this process wrote or read."""
        self.actions_created = ""
        """When the ACTIONS was made that it is in; empty: not known."""
        self._around = around
        self._log = around.log.bind(job=job.job, generation=job.generation)
        self._superseded = False
        self._has_begun = False
        """Whether a state was folded."""
        self._fold = Fold(job, policy, None, profile)
        self._watch = None if job.policy == Static.name else SizeWatch(job)  # static sizes are not stuck

    @classmethod
    async def open(cls, job: Job, around: Surroundings, known: Stored | None = None) -> Self:
        """Start from the job's newest action, with its policy; a generation without actions chooses its policy here.

        `known` is the newest action that this process knows of the job's earlier generations.

        Raises:
            ActionsEndEarlyError: when it cannot be the newest; one of several servers may say so for 10 s.
            ActionStoreError: when it cannot be one of this job.
            ValueError: when there is no such policy, or not any more.
        """
        newest, lost_until = await checked_action(around.bus, job, known)
        recorded = _of_generation(newest, job)
        policy = await around.policies.choose(job, recorded)
        profile = b"" if recorded is not None else await around.profiles.choose(job, policy)
        opened = cls(job, policy, around, profile)
        if newest is not None:
            opened._adopt(newest)
        if lost_until:
            opened._fold.start_after_gap(lost_until)
            opened._has_begun = True
        opened._log.info("decides", policy=job.policy, version=opened._fold.policy.version)
        return opened

    @property
    def watermark(self) -> int:
        """FEED sequence after which a restart continues to read."""
        return self._fold.watermark

    @property
    def stuck_share(self) -> float:
        """Share of the ranks whose size is stuck at a bound; see `SizeWatch`."""
        return 0.0 if self._watch is None else self._watch.stuck_share

    @property
    def has_inputs(self) -> bool:
        """Whether it continues after states that were decided before."""
        return self._fold.next_window > 0

    def check_inputs(self, feed: StreamState) -> None:
        """Continue after a gap if FEED no longer holds what follows the watermark.

        A watermark behind FEED's end belongs to another FEED: the stream was made again.
        """
        if self.has_inputs and not feed.first_sequence - 1 <= self.watermark <= feed.last_sequence:
            self._log.warning("inputs after the checkpoint are gone", watermark=self.watermark, **feed._asdict())
            self._fold.start_after_gap(max(0, feed.first_sequence - 1))

    async def add_state(self, sequence: int, state: State) -> None:
        """Fold one state and publish every decision that it makes possible.

        Raises:
            ActionStoreError: when the stored actions are not those that this process wrote.
            ValueError: when another arbitrator decided first, by a policy that is not there.
        """
        if state.window and not self._has_begun and not self.has_inputs:
            # no action is stored, nor the states that one would be made from: the streams were made again meanwhile
            self._fold.start_after_gap(sequence - 1)
        self._has_begun = True
        if not self._fold.add_state(sequence, state):
            self._around.count("late_states")
        while not self._superseded and (action := self._fold.close()) is not None:
            await self._publish(action)

    async def _publish(self, action: Action) -> None:
        sequence = await self._store(action)
        if sequence is None:
            return
        self.known = Stored(sequence, action)
        self._fold.adopt(action)
        self._around.count("decided")
        if self._fold.note:
            self._log.info(self._fold.note, family=self.job.family, window=action.window)
        self._log.debug("decided", window=action.window, local_batch_sizes=action.local_batch_sizes[:16])
        await self._watch_sizes(action)

    async def _store(self, action: Action) -> int | None:
        """Store an action; `None` when another arbitrator's is there, which is adopted.

        A server that was cut off refuses what follows the actions that it does not know: then both are tried again.
        """
        expected_last = _sequence_of(self.known)
        wait = FailoverWait(self._around.bus.stream_state, FEED.name)
        while True:
            try:
                return await self._around.bus.publish_action(action, expected_last=expected_last)
            except StaleWriterError as refusal:
                try:
                    newest = await self._decided_by_another(expected_last, refusal)
                except ActionsEndEarlyError:
                    if not await wait.pause():
                        raise
                    continue
            await self._adopt_newest(newest)
            return None

    async def _decided_by_another(self, expected_last: int, refusal: StaleWriterError) -> Stored | None:
        """The newest action, after ours was refused for it; `None` when ours was dropped to make room.

        The leader of a cluster may refuse for an action that it is about to store; a broker with a damaged disk may
        refuse for one that it can no longer read.
        """
        for wait_s in (*SHOW_WAITS_S, None):
            newest = await newest_action(self._around.bus, self.job)
            await check_goes_on(self._around.bus, self.job, self.known, newest)
            if _sequence_of(newest) != expected_last:
                return newest
            if wait_s is not None:
                await asyncio.sleep(wait_s)
        window = -1 if newest is None else newest.action.window
        raise ActionsEndEarlyError(
            f"the broker refuses an action for one that it does not show: {refusal}", window=window, known_window=window
        )

    async def _watch_sizes(self, action: Action) -> None:
        """Publish an event when sizes stick to a bound; a restarted arbitrator counts windows from zero."""
        finding = None if self._watch is None else self._watch.observe_sizes(action.local_batch_sizes)
        if finding is None:
            return
        self._around.count("size_stuck")
        self._log.warning(finding.explanation, signature=finding.signature, window=action.window)
        event = finding.event(job=action.job, generation=action.generation, window=action.window, service="arbitrator")
        await self._around.bus.publish_soon(event)

    async def _adopt_newest(self, newest: Stored | None) -> None:
        """Continue after another arbitrator's action, with the policy that decided it."""
        if newest is None:
            self.known = None
            return
        recorded, policy = _of_generation(newest, self.job), self._fold.policy
        ours = (policy.version, digest_of(policy))
        if recorded is not None and (recorded.policy_version, recorded.policy_digest) != ours:
            self._fold.policy = await self._policy_of(recorded)
        self._adopt(newest)

    async def _policy_of(self, recorded: Action) -> Policy:
        """The policy that decided an action; its file may be newer than what the server that answers knows."""
        wait = FailoverWait(self._around.bus.stream_state, FEED.name)
        while True:
            try:
                return await self._around.policies.choose(self.job, recorded)
            except PolicyAbsentError:
                if not await wait.pause():
                    raise

    def _adopt(self, stored: Stored) -> None:
        self._superseded = stored.action.generation > self.job.generation
        self._fold.adopt(stored.action)
        self.known = stored
        self._around.count("adopted")
        self._log.info("adopted a stored action", window=stored.action.window, of_generation=stored.action.generation)


def _sequence_of(stored: Stored | None) -> int:
    """0 for none, as the broker has it."""
    return 0 if stored is None else stored.sequence


def _of_generation(stored: Stored | None, job: Job) -> Action | None:
    """The action, if it is of this generation."""
    return stored.action if stored is not None and stored.action.generation == job.generation else None


def reason_of(error: Exception) -> tuple[str, Exception | None]:
    """The text of the error, and the error itself where it is unexpected and its traceback is wanted."""
    is_foreseen = isinstance(error, (ActionStoreError, ValueError))
    return (str(error), None) if is_foreseen else (repr(error), error)


def refused_log(job: str, generation: int, error: ActionStoreError) -> Event:
    """The event about stored actions that are not those that were written: people have to fix what the broker lost."""
    return Event(
        job=job,
        generation=generation,
        window=max(0, error.known_window),
        signature="log-refused",
        service="arbitrator",
        value=error.window,
        limit=error.known_window,
        explanation=str(error)[:MAX_EXPLANATION],
    )
