"""Statistics of handled messages by kind: numbers, errors, time; shown in /metrics."""

from dataclasses import dataclass

from dynamix.schemas.kinds import BY_NAME
from dynamix.schemas.subjects import ROOT

MAX_ERROR_TEXT = 200
OTHER = "other"


@dataclass(slots=True)
class HandlingStatistics:
    """Messages of one kind that were handed to the service, and what became of them.

    Attributes:
        num_messages: handed out.
        num_errors: of those, set aside because they could not be used.
        last_error: why the last of them could not.
        processing_ns: from a batch handed out until the next one was asked for; waiting for acknowledgements included.
    """

    kind: str
    num_messages: int = 0
    num_errors: int = 0
    last_error: str = ""
    processing_ns: int = 0

    def record_error(self, reason: str) -> None:
        """Note that one of the messages could not be used."""
        self.num_errors += 1
        self.last_error = reason[:MAX_ERROR_TEXT]


class StatisticsByKind:
    """One `HandlingStatistics` for each kind that was asked for: at most one per kind."""

    def __init__(self) -> None:
        self._by_kind: dict[str, HandlingStatistics] = {}

    def of_subjects(self, *subjects: str) -> HandlingStatistics:
        """Statistics for a subject or some filters; filters of several kinds share one entry."""
        kinds = {subject.removeprefix(ROOT + ".").partition(".")[0] for subject in subjects}
        kind = kinds.pop() if len(kinds) == 1 and kinds <= BY_NAME.keys() else OTHER
        return self._by_kind.setdefault(kind, HandlingStatistics(kind))

    def all(self) -> list[HandlingStatistics]:
        """List the statistics, sorted by kind."""
        return [self._by_kind[kind] for kind in sorted(self._by_kind)]
