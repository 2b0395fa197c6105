"""The events of a replayed arbitrator, held against the recorded ones.

An arbitrator counts sizes at their bounds from its own start. A restart is not recorded, but shows here: an event that
the replay has not, or has later or earlier. Then the actions before the event are counted anew, as the restarted
arbitrator did.
"""

from collections.abc import Sequence

from dynamix.arbitrator.deciding.signatures import SizeWatch
from dynamix.recording.capture import Record
from dynamix.schemas import codec, subjects
from dynamix.schemas.codec import MalformedMessageError, decode, encode
from dynamix.schemas.messages import Action, Event, Job

from .counts import Tally
from .position import Place

SIGNATURE = "size-stuck"
"""The one that follows from decisions alone."""


class Events:
    """Takes what is published, then what was recorded."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._replayed: dict[str, bytes] = {}

    def replayed(self, event: Event) -> None:
        """Take an event of the replay."""
        if event.signature == SIGNATURE:
            self._replayed[codec.message_id(event)] = encode(event)
        else:
            self._tally.note(f"the replayed arbitrator says {event.signature}: {event.explanation}")

    def recorded(self, record: Record, job: Job | None, actions: Sequence[Action]) -> None:
        """Take a recorded event, with the actions that were stored before it, oldest first."""
        try:
            event = decode(Event, record.subject, record.payload)
        except MalformedMessageError as error:
            self._tally.note(f"the event at {record.sequence} cannot be decoded: {error}")
            return
        if (event.service, event.signature) != ("arbitrator", SIGNATURE):
            self._tally.note(f"{event.service} said {event.signature} in window {event.window}: {event.explanation}")
            return
        place = Place(event.generation, event.window)
        replayed = self._replayed.pop(codec.message_id(event), None) or _counted_anew(event, job, actions)
        if replayed is None:
            self._tally.miss("event", record.subject, place, "only recorded", record.sequence)
            return
        self._tally.compare(
            "event", record.subject, lambda: place, recorded=record.payload, replayed=replayed, sequence=record.sequence
        )

    def finish(self) -> None:
        """What is left was not said by the recorded arbitrator: it may have been started anew shortly before."""
        for identity in self._replayed:
            self._tally.num_outside += 1
            self._tally.note(f"{identity} is said in the replay only: an arbitrator that is started anew counts anew")
        self._replayed.clear()


def _counted_anew(event: Event, job: Job | None, actions: Sequence[Action]) -> bytes | None:
    """The event as an arbitrator would say it that had been started just long enough before; `None` if it would not."""
    upto = [action for action in actions if action.generation == event.generation and action.window <= event.window]
    if job is None or not upto or upto[-1].window != event.window:
        return None
    watch, finding = SizeWatch(job), None
    for action in upto:
        finding = watch.observe_sizes(action.local_batch_sizes) or finding
    if finding is None:
        return None
    said = finding.event(job=event.job, generation=event.generation, window=event.window, service="arbitrator")
    assert subjects.subject_of(said) == subjects.subject_of(event), "of the same job"
    return encode(said)
