"""One job's decisions on the bus: folds its states, publishes its actions under compare-and-set, adopts another's."""

from asyncio import Future
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

from structlog.stdlib import BoundLogger

from dynamix.runtime.bus import Message, StaleWriterError, StreamState
from dynamix.schemas import subjects
from dynamix.schemas.codec import MalformedMessageError, decode
from dynamix.schemas.messages import Action, Event, Job, State
from dynamix.schemas.streams import ACTIONS

from .fold import Fold
from .policies.static import Static
from .policy import Policy, digest_of
from .policy_source import Policies
from .signatures import SizeWatch, event_of


class ActionLog(Protocol):
    """What of the bus a job's decisions need."""

    async def last(self, stream: str, subject: str) -> Message | None:
        """The newest message on a subject."""

    async def publish_action(self, action: Action, *, expected_last: int) -> int:
        """Store an action if the job's newest one has the sequence `expected_last`."""

    async def publish_soon(self, message: Event) -> Future[int]:
        """Send an event; errors are the bus's to log."""


class ActionLogError(RuntimeError):
    """The log of actions is not the one this arbitrator wrote: it refuses to decide on top of it."""


@dataclass(frozen=True)
class Surroundings:
    """What all jobs of an arbitrator share."""

    bus: ActionLog
    policies: Policies
    log: BoundLogger
    count: Callable[[str], None]


class _Stored(NamedTuple):
    """A job's newest action, and where it stands in ACTIONS."""

    sequence: int
    action: Action


class JobLog:
    """The fold of one generation of a job, joined to its subject in ACTIONS; made by `open`."""

    def __init__(self, job: Job, policy: Policy, around: Surroundings) -> None:
        self.job = job
        self._bus = around.bus
        self._policies = around.policies
        self._count = around.count
        self._log = around.log.bind(job=job.job, generation=job.generation)
        self._policy = policy
        self._last_sequence = 0
        self._superseded = False
        self._fold = Fold(job, policy, None)
        self._watch = None if job.policy == Static.name else SizeWatch(job)  # who never decides is not stuck

    @classmethod
    async def open(cls, job: Job, around: Surroundings) -> Self:
        """Start from the job's newest action, with the policy that decided it or, at a start, the one of choice.

        Raises:
            ActionLogError: when the newest action cannot be one of this job.
            ValueError: when there is no such policy, or not any more.
        """
        newest = await _newest(around.bus, job)
        opened = cls(job, await around.policies.choose(job, _of_generation(newest, job)), around)
        if newest is not None:
            opened._adopt(newest)
        opened._log.info("decides", policy=job.policy, version=opened._policy.version)
        return opened

    @property
    def watermark(self) -> int:
        """FEED sequence that a restart reads on after."""
        return self._fold.watermark

    def check_inputs(self, feed: StreamState) -> None:
        """Go on after a gap if FEED no longer holds what follows the watermark.

        A watermark behind FEED's end is one of another FEED: the stream was made anew.
        """
        if self._fold.next_window > 0 and not feed.first_sequence - 1 <= self.watermark <= feed.last_sequence:
            self._log.warning("inputs after the checkpoint are gone", watermark=self.watermark, **feed._asdict())
            self._fold.start_after_gap(max(0, feed.first_sequence - 1))

    async def add(self, sequence: int, state: State) -> None:
        """Fold one state and publish every decision that it makes possible.

        Raises:
            ActionLogError: when the stored actions are not the ones that we wrote.
            ValueError: when another arbitrator decided first, by a policy that is not there.
        """
        if not self._fold.add(sequence, state):
            self._count("late_states")
        while not self._superseded and (action := self._fold.close()) is not None:
            await self._publish(action)

    async def _publish(self, action: Action) -> None:
        try:
            self._last_sequence = await self._bus.publish_action(action, expected_last=self._last_sequence)
        except StaleWriterError:
            await self._adopt_newest()
            return
        self._fold.adopt(action)
        self._count("decided")
        self._log.debug("decided", window=action.window, local_batch_sizes=action.local_batch_sizes[:16])
        await self._watch_sizes(action)

    async def _watch_sizes(self, action: Action) -> None:
        """Say once on the bus when sizes stick to a bound; a restarted arbitrator counts its windows anew."""
        finding = None if self._watch is None else self._watch.add(action.local_batch_sizes)
        if finding is None:
            return
        self._count("size_stuck")
        self._log.warning(finding.explanation, signature=finding.signature, window=action.window)
        await self._bus.publish_soon(
            event_of(
                finding,
                job=action.job,
                generation=action.generation,
                window=action.window,
                service="arbitrator",
            )
        )

    async def _adopt_newest(self) -> None:
        """Take the newest stored action, another arbitrator's, as the point to go on from, and its policy with it."""
        newest = await _newest(self._bus, self.job)
        sequence = 0 if newest is None else newest.sequence
        if sequence < self._last_sequence:
            raise ActionLogError(
                f"{subjects.action(self.job.job)} ends at {sequence}, before our own {self._last_sequence}: "
                "was the broker's store replaced by an old copy?"
            )
        if newest is None or sequence == self._last_sequence:
            return
        recorded = _of_generation(newest, self.job)
        if recorded is not None and not _decided_by(recorded, self._policy):
            self._policy = await self._policies.choose(self.job, recorded)
            self._fold.use(self._policy)
        self._adopt(newest)

    def _adopt(self, stored: _Stored) -> None:
        self._superseded = stored.action.generation > self.job.generation
        self._fold.adopt(stored.action)
        self._last_sequence = stored.sequence
        self._count("adopted")
        self._log.info("adopted a stored action", window=stored.action.window, of_generation=stored.action.generation)


async def _newest(bus: ActionLog, job: Job) -> _Stored | None:
    """The job's newest action, whoever wrote it.

    Raises:
        ActionLogError: when it cannot be read, or cannot be one of this job.
    """
    subject = subjects.action(job.job)
    message = await bus.last(ACTIONS.name, subject)
    if message is None:
        return None
    try:
        action = decode(Action, message.subject, message.payload)
    except MalformedMessageError as error:
        raise ActionLogError(f"{subject} at {message.sequence} cannot be read: {error}") from error
    if action.generation == job.generation and len(action.local_batch_sizes) != job.world_size:
        raise ActionLogError(
            f"{subject} at {message.sequence} sizes {len(action.local_batch_sizes)} ranks, the job has "
            f"{job.world_size}: an id serves one run, start this one under another"
        )
    return _Stored(message.sequence, action)


def _of_generation(stored: _Stored | None, job: Job) -> Action | None:
    """The action, if it is of this generation."""
    return stored.action if stored is not None and stored.action.generation == job.generation else None


def _decided_by(action: Action, policy: Policy) -> bool:
    return (action.policy_version, action.policy_digest) == (policy.version, digest_of(policy))
