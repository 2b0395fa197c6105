"""The transport: how this rank's messages leave and actions come in; `attach(connect=...)` takes any that fits."""

from collections import deque
from collections.abc import Iterator
from typing import Protocol

from dynamix.schemas.messages import Action, Message

INBOX_ACTIONS = 64
"""Only the newest action counts; the rest is slack for one window."""


class Transport(Protocol):
    """What the training thread calls; every call returns at once, but for `close`."""

    @property
    def num_reports_dropped(self) -> int:
        """Reports dropped so far because the bus was away for too long."""

    @property
    def num_malformed(self) -> int:
        """Messages on the job's action subject that were not valid actions."""

    def publish(self, message: Message) -> None:
        """Hand a message over."""

    def offer(self, action: Action) -> None:
        """Hand in an action from within the process, as if the bus had delivered it."""

    def take_actions(self) -> Iterator[Action]:
        """The actions received since the last call, oldest first."""

    def begin_close(self, timeout_s: float) -> None:
        """Let the transport end once all messages have left, at the latest after `timeout_s`."""

    def close(self, timeout_s: float) -> None:
        """End it: wait at most `timeout_s` for the last messages, and a little for the connection."""


class ActionInbox:
    """The actions received and not yet looked at."""

    def __init__(self) -> None:
        self._actions: deque[Action] = deque(maxlen=INBOX_ACTIONS)

    def offer(self, action: Action) -> None:
        """Add an action; safe from any thread."""
        self._actions.append(action)

    def take_actions(self) -> Iterator[Action]:
        """The actions received since the last call, oldest first."""
        while self._actions:
            yield self._actions.popleft()


class LocalTransport(ActionInbox):
    """The transport of a rank that does not speak on the bus: actions come from within the process only."""

    num_reports_dropped = 0
    num_malformed = 0

    def publish(self, message: Message) -> None:
        """Drop it: there is no bus to publish on."""

    def begin_close(self, timeout_s: float) -> None:
        """Nothing is under way."""

    def close(self, timeout_s: float) -> None:
        """Nothing is under way."""
