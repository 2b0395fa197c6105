"""A capture as the page shows it: its messages in order, folded into a board up to any moment."""

from bisect import bisect_right
from pathlib import Path
from typing import NamedTuple

from dynamix.cli.board.board import Board
from dynamix.cli.board.timeline import Timeline
from dynamix.cli.output import Document
from dynamix.recording.capture import CaptureReader
from dynamix.schemas.codec import MalformedMessageError, decode_any
from dynamix.schemas.messages import Message

from .alarms import alarms_of_job
from .documents import curves, decisions, job_now

MOST_WINDOWS = 5000
"""Windows of a capture that have curves: the newest ones."""
SHOWN_KINDS = ("job", "window", "reward", "action", "applied", "event")


class TimedMessage(NamedTuple):
    """One message of a capture, and when the broker stored it."""

    timestamp_ns: int
    message: Message


class CapturedJob:
    """All of one capture that a board folds, in memory."""

    def __init__(self, path: Path) -> None:
        """Read what is good of the file. Raises CaptureError when it is no capture, and OSError."""
        self.path = path
        self.notes: list[str] = []
        self._messages: list[TimedMessage] = []
        num_malformed = 0
        with CaptureReader(path) as reader:
            self.job = reader.header.job
            for record in reader.good_records():
                if record.subject.split(".")[2:3][0] not in SHOWN_KINDS:
                    continue
                try:
                    message = decode_any(record.subject, record.payload)
                except MalformedMessageError:
                    num_malformed += 1
                    continue
                self._messages.append(TimedMessage(record.timestamp_ns, message))
            self.notes += [str(fault) for fault in reader.faults]
        if num_malformed:
            self.notes.append(f"{num_malformed} messages cannot be decoded and are left out")

    @property
    def start_ns(self) -> int:
        """When the broker stored the first message, 0 without one."""
        return self._messages[0].timestamp_ns if self._messages else 0

    @property
    def duration_s(self) -> float:
        """Seconds from the first message to the last."""
        return (self._messages[-1].timestamp_ns - self.start_ns) / 1e9 if self._messages else 0.0

    def board_at(self, elapsed_s: float) -> Board:
        """The board as it was so long after the first message."""
        board = Board(self.job, timeline=Timeline(MOST_WINDOWS))
        end_ns = self.start_ns + int(elapsed_s * 1e9)
        count = bisect_right(self._messages, end_ns, key=lambda entry: entry.timestamp_ns)
        for timestamp_ns, message in self._messages[:count]:
            board.fold(message, timestamp_ns)
        return board

    def document(self, elapsed_s: float, *, with_curves: bool) -> Document:
        """What the page shows of that moment; the curves are those of the whole capture, whatever the moment is."""
        board = self.board_at(elapsed_s)
        now_ns = self.start_ns + int(elapsed_s * 1e9)
        found: Document = {
            "file": self.path.name,
            "notes": self.notes,
            "start_unix_s": self.start_ns / 1e9,
            "duration_s": self.duration_s,
            "elapsed_s": elapsed_s,
            "job": job_now(board, now_ns),
            "decisions": decisions(board),
            "alarms": [{"level": one.level, "text": one.text} for one in alarms_of_job(board, now_ns)],
        }
        if with_curves:
            found["curves"] = curves(self.board_at(self.duration_s))
        return found
