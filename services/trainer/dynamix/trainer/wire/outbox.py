"""Messages on their way from the training thread to the bus: bounded, in order, never waited for."""

import threading
from collections import deque

from dynamix.schemas.messages import Message, Report


class Outbox:
    """Holds messages until the bus has acknowledged them.

    Full, it gives up its oldest report: a fresh window is worth more than an old one, and a job's specification or an
    adoption is needed always. The lock guards a few list operations and is never held over I/O.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._messages: deque[Message] = deque()
        self._lock = threading.Lock()
        self.num_dropped = 0
        """Reports given up so far."""

    def put(self, message: Message) -> None:
        """Add a message at the end."""
        with self._lock:
            if len(self._messages) >= self._capacity:
                self._drop_oldest_report()
            self._messages.append(message)

    def oldest(self) -> Message | None:
        """The message that is to leave next; it stays until `remove`."""
        with self._lock:
            return self._messages[0] if self._messages else None

    def remove(self, message: Message) -> None:
        """Take out the message that `oldest` returned: it has left."""
        with self._lock:
            assert self._messages[0] is message, "a message left the outbox that was not its oldest"
            self._messages.popleft()

    def __len__(self) -> int:
        return len(self._messages)

    def _drop_oldest_report(self) -> None:
        for index, message in enumerate(self._messages):
            if index > 0 and isinstance(message, Report):  # the first may be on its way
                del self._messages[index]
                self.num_dropped += 1
                return
