"""The training thread's view of the bus: messages out; actions and traces in.

`client` is the transport with a broker. This module imports neither nats nor asyncio: a job without a broker needs
neither.
"""

from collections import deque
from collections.abc import Iterator

from dynamix.schemas.messages import Action, Message, Trace

INBOX_ACTIONS = 64
"""Only the newest action counts; the rest is slack for one window."""


class Transport:
    """The bus client's interface for the training thread; every call returns at once, except `close`.

    This one does not speak on the bus: messages are dropped, and actions come from within the process only.
    """

    num_malformed = 0
    """Messages on the job's action subject that were not valid actions."""

    num_reports_dropped = 0
    """Reports dropped so far because the bus was away for too long."""

    newest_trace: Trace | None = None
    """The newest trace of this node's agent, in the first rank of each node under `stigmergy`."""

    def __init__(self) -> None:
        self._actions: deque[Action] = deque(maxlen=INBOX_ACTIONS)

    def publish(self, message: Message) -> None:
        """Hand a message over."""

    def offer(self, action: Action) -> None:
        """Hand in an action from within the process, as if the bus had delivered it; safe from any thread."""
        self._actions.append(action)

    def take_actions(self) -> Iterator[Action]:
        """The actions received since the last call, oldest first."""
        while self._actions:
            yield self._actions.popleft()

    def leave_trace(self, trace: Trace) -> None:
        """Store the newest trace of this node's agent; safe from any thread."""
        self.newest_trace = trace

    def begin_close(self, timeout_s: float) -> None:
        """End the transport once all messages are sent, at the latest after `timeout_s`; returns at once."""

    def close(self, timeout_s: float) -> None:
        """End it: wait at most `timeout_s` for the last messages, and a little for the connection."""
