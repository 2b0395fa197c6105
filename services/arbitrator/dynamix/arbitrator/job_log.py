"""One job's decisions on the bus: folds its states, publishes its actions under compare-and-set, adopts another's."""

from collections.abc import Callable
from typing import Protocol

from structlog.stdlib import BoundLogger

from dynamix.runtime.bus import Message, StaleWriterError, StreamState
from dynamix.schemas import subjects
from dynamix.schemas.codec import MalformedMessageError, decode
from dynamix.schemas.messages import Action, Job, State
from dynamix.schemas.streams import ACTIONS

from .fold import Fold
from .policies import policy_named


class ActionLog(Protocol):
    """What of the bus a job's decisions need."""

    async def last(self, stream: str, subject: str) -> Message | None:
        """The newest message on a subject."""

    async def publish_action(self, action: Action, *, expected_last: int) -> int:
        """Store an action if the job's newest one has the sequence `expected_last`."""


class ActionLogError(RuntimeError):
    """The log of actions is not the one this arbitrator wrote: it refuses to decide on top of it."""


class JobLog:
    """The fold of one generation of a job, joined to its subject in ACTIONS."""

    def __init__(self, bus: ActionLog, job: Job, log: BoundLogger, count: Callable[[str], None]) -> None:
        self.job = job
        self._count = count
        self._bus = bus
        self._subject = subjects.action(job.job)
        self._last_sequence = 0
        self._superseded = False
        self._fold = Fold(job, policy_named(job.policy), None)
        self._log = log.bind(job=job.job, generation=job.generation)

    @property
    def watermark(self) -> int:
        """FEED sequence that a restart reads on after."""
        return self._fold.watermark

    async def resume(self, feed: StreamState) -> None:
        """Start from the job's newest action; after a gap if FEED no longer holds what follows its watermark.

        A watermark behind FEED's end is one of another FEED: the stream was made anew.

        Raises:
            ActionLogError: when the newest action cannot be one of this job.
        """
        await self._adopt_newest()
        if self._fold.next_window > 0 and not feed.first_sequence - 1 <= self.watermark <= feed.last_sequence:
            self._log.warning("inputs after the checkpoint are gone", watermark=self.watermark, **feed._asdict())
            self._fold.start_after_gap(max(0, feed.first_sequence - 1))

    async def add(self, sequence: int, state: State) -> None:
        """Fold one state and publish every decision that it makes possible."""
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

    async def _adopt_newest(self) -> None:
        """Take the newest stored action, whoever wrote it, as the point to go on from."""
        message = await self._bus.last(ACTIONS.name, self._subject)
        sequence = 0 if message is None else message.sequence
        if sequence < self._last_sequence:
            raise ActionLogError(
                f"{self._subject} ends at {sequence}, before our own {self._last_sequence}: "
                "was the broker's store replaced by an old copy?"
            )
        if message is None or sequence == self._last_sequence:
            return
        try:
            action = decode(Action, message.subject, message.payload)
        except MalformedMessageError as error:
            raise ActionLogError(f"{self._subject} at {sequence} cannot be read: {error}") from error
        if action.generation == self.job.generation and len(action.local_batch_sizes) != self.job.world_size:
            raise ActionLogError(
                f"{self._subject} at {sequence} sizes {len(action.local_batch_sizes)} ranks, the job has "
                f"{self.job.world_size}: an id serves one run, start this one under another"
            )
        self._superseded = action.generation > self.job.generation
        self._fold.adopt(action)
        self._last_sequence = sequence
        self._count("adopted")
        self._log.info("adopted a stored action", window=action.window, of_generation=action.generation)
