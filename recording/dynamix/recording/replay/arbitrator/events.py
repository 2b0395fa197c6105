"""Compares the events of a replayed arbitrator with the recorded ones.

An arbitrator counts sizes at their bounds from its own start. A restart is not recorded, but has an effect here: an
event that the replay lacks, or has later or earlier. Then the actions before the event are counted from the start of a
restarted arbitrator.
"""

from collections.abc import Sequence

from dynamix.arbitrator.deciding.signatures import SizeWatch
from dynamix.recording.capture import Record, WindowKey
from dynamix.recording.comparison import OutputCounts
from dynamix.schemas import codec, subjects
from dynamix.schemas.codec import MalformedMessageError, decode, encode
from dynamix.schemas.messages import Action, Event, Job

SIGNATURE = "size-stuck"
"""The only signature that depends on decisions alone."""


class EventComparer:
    """Takes the events of the replay, then the recorded ones."""

    def __init__(self, counts: OutputCounts) -> None:
        self._counts = counts
        self._replayed: dict[str, bytes] = {}

    def add_replayed(self, event: Event) -> None:
        """Add an event of the replay."""
        if event.signature == SIGNATURE:
            self._replayed[codec.message_id(event)] = encode(event)
        else:
            self._counts.add_note(f"the replayed arbitrator reports {event.signature}: {event.explanation}")

    def add_recorded(self, record: Record, job: Job | None, actions: Sequence[Action]) -> None:
        """Compare a recorded event; `actions` were stored before it, oldest first."""
        try:
            event = decode(Event, record.subject, record.payload)
        except MalformedMessageError as error:
            self._counts.num_uncompared += 1
            self._counts.add_note(f"the event at {record.sequence} cannot be decoded: {error}")
            return
        if (event.service, event.signature) != ("arbitrator", SIGNATURE):
            found = f"{event.service} reported {event.signature} in window {event.window}"
            self._counts.add_note(f"{found}: {event.explanation}")
            return
        key = WindowKey(event.generation, event.window)
        replayed = self._replayed.pop(codec.message_id(event), None) or _after_restart(event, job, actions)
        if replayed is None:
            self._counts.count_missing("only recorded", record.subject, key, record.sequence)
        else:
            self._counts.count_pair(record, key, replayed)

    def finish(self) -> None:
        """Note the events that were not recorded: the recorded arbitrator may have been restarted shortly before."""
        for identity in self._replayed:
            self._counts.num_outside += 1
            self._counts.add_note(f"{identity} is only in the replay: a restarted arbitrator counts from its start")
        self._replayed.clear()


def _after_restart(event: Event, job: Job | None, actions: Sequence[Action]) -> bytes | None:
    """The event of an arbitrator that was restarted just long enough before; `None` if it would not report it."""
    until = [action for action in actions if action.generation == event.generation and action.window <= event.window]
    if job is None or not until or until[-1].window != event.window:
        return None
    watch, finding = SizeWatch(job), None
    for action in until:
        finding = watch.observe_sizes(action.local_batch_sizes) or finding
    if finding is None:
        return None
    found = finding.event(job=event.job, generation=event.generation, window=event.window, service="arbitrator")
    assert subjects.subject_of(found) == subjects.subject_of(event), "of the same job"
    return encode(found)
