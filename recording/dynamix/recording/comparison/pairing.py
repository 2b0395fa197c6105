"""Pairs replayed outputs with recorded ones by their identity: the order may differ, the content may not. Pure."""

from dynamix.recording.capture import Record, WindowKey
from dynamix.recording.capture.identity import identity_of, kind_of, window_key_of

from .counts import OutputCounts

MAX_UNPAIRED = 1 << 16
"""Replayed outputs that wait for their recorded counterparts; of more, the oldest counts as missing."""
NUM_REMEMBERED = 1 << 16
"""Paired identities that are kept to recognise a repetition."""
EDGE_WINDOWS = 2
"""At the end of a capture the outputs of this many windows may not have been recorded yet."""


class OutputPairing:
    """Takes each output once from both sides; the replayed one comes before the recorded one."""

    def __init__(self, counts: OutputCounts) -> None:
        self._counts = counts
        self._unpaired: dict[str, tuple[str, bytes]] = {}
        """Subject and payload of replayed outputs, by identity."""
        self._paired: dict[str, None] = {}
        self._first: WindowKey | None = None
        self._newest: WindowKey | None = None

    def add_replayed(self, identity: str, subject: str, payload: bytes) -> None:
        """Add an output of the replay."""
        self._unpaired[identity] = (subject, payload)
        if len(self._unpaired) > MAX_UNPAIRED:
            self._count_unpaired(next(iter(self._unpaired)))

    def add_recorded(self, record: Record) -> None:
        """Add a recorded output, after the replay of everything that the recorded service had read by then."""
        identity = identity_of(record)
        key = window_key_of(identity)
        if key is None:
            self._counts.add_note(f"{record.subject} at {record.sequence} is no output that a service can publish")
            return
        self._first = min(self._first or key, key)
        self._newest = max(self._newest or key, key)
        if identity in self._unpaired:
            self._pair(identity, key, record)
        elif identity in self._paired:
            self._counts.num_repeated += 1
        elif key.window > 0 and key == self._first:  # the capture begins in the middle of this window
            self._counts.num_outside += 1
        else:
            self._counts.count_missing(kind_of(record), record.subject, key, "only recorded", record.sequence)

    def finish(self) -> None:
        """Count the replayed outputs without a recorded one: missing, or at an edge of the capture."""
        for identity in list(self._unpaired):
            self._count_unpaired(identity)

    def _pair(self, identity: str, key: WindowKey, record: Record) -> None:
        _, payload = self._unpaired.pop(identity)
        self._paired[identity] = None
        if len(self._paired) > NUM_REMEMBERED:
            self._paired.pop(next(iter(self._paired)))
        self._counts.count_pair(
            kind_of(record), record.subject, key, recorded=record.payload, replayed=payload, sequence=record.sequence
        )

    def _count_unpaired(self, identity: str) -> None:
        subject, _ = self._unpaired.pop(identity)
        key = window_key_of(identity)
        assert key is not None, "outputs of services are about a window"
        if self._is_at_an_edge(key):
            self._counts.num_outside += 1
        else:
            self._counts.count_missing(identity.partition(":")[0], subject, key, "only replayed")

    def _is_at_an_edge(self, key: WindowKey) -> bool:
        if self._first is None or self._newest is None or key <= self._first:
            return True
        return key > self._newest._replace(window=self._newest.window - EDGE_WINDOWS)
