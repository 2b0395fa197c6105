"""Counts of a capture so far: messages by kind, windows, and whether the wanted windows are complete. Pure."""

from collections import Counter

from dynamix.recording.capture import Record
from dynamix.schemas import subjects
from dynamix.schemas.codec import MalformedMessageError, decode_any
from dynamix.schemas.messages import Report


class CaptureCounts:
    """Counts records as they are written.

    Attributes:
        kinds: messages by kind.
        num_windows: different windows that some node reported, over all generations.
        num_malformed: reports that cannot be decoded; their windows are not counted.
    """

    def __init__(self, most_windows: int | None = None) -> None:
        self.kinds: Counter[str] = Counter()
        self.num_malformed = 0
        self._most_windows = most_windows
        self._windows: set[tuple[int, int]] = set()

    @property
    def num_windows(self) -> int:
        """Windows so far."""
        return len(self._windows)

    def count_record(self, record: Record) -> bool:
        """Count a record; False, without counting it, when it begins a window beyond the wanted number.

        The messages that follow from the last wanted window come before the next one's first report, as a rule: a
        window takes longer than deciding on it.
        """
        kind = _kind(record.subject)
        if kind == "report" and not self._count_window(record):
            return False
        self.kinds[kind] += 1
        return True

    def _count_window(self, record: Record) -> bool:
        try:
            report = decode_any(record.subject, record.payload)
        except MalformedMessageError:
            self.num_malformed += 1
            return True
        assert isinstance(report, Report), "the subject says so"
        window = (report.generation, report.window)
        if window not in self._windows and self.num_windows == self._most_windows:
            return False
        self._windows.add(window)
        return True


def _kind(subject: str) -> str:
    try:
        return subjects.parse(subject).kind
    except ValueError:  # the token of another program
        return "foreign"
