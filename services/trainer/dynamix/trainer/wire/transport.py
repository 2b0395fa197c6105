"""How a rank's messages leave, and actions, traces and rewards come in: in the process, or by `client` over the bus."""

import threading
from collections import deque
from collections.abc import Iterator

from dynamix.schemas.messages import Action, Message, Report, Reward, Trace

INBOX_ACTIONS = 64
"""Only the newest action counts; the rest is slack for one window."""
INBOX_REWARDS = 4096
"""One per node and window; they inform only, of more the oldest are dropped."""


class Transport:
    """What the training thread calls; every call returns at once, but for `close`.

    This one does not speak on the bus: messages are dropped, and actions come from within the process only.
    """

    num_malformed = 0
    """Messages on the job's action subject that were not valid actions."""

    newest_trace: Trace | None = None
    """What the agent of this node left last; from the bus in the first rank of each node, where agents rule."""

    def __init__(self) -> None:
        self._actions: deque[Action] = deque(maxlen=INBOX_ACTIONS)
        self._rewards: deque[Reward] = deque(maxlen=INBOX_REWARDS)

    @property
    def num_reports_dropped(self) -> int:
        """Reports dropped so far because the bus was away for too long."""
        return 0

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
        """Hand in what this node's agent left: the last one counts; safe from any thread."""
        self.newest_trace = trace

    def add_reward(self, reward: Reward) -> None:
        """Hand in a node's rewards for one window; safe from any thread."""
        self._rewards.append(reward)

    def take_rewards(self) -> Iterator[Reward]:
        """The rewards received since the last call, oldest first."""
        while self._rewards:
            yield self._rewards.popleft()

    def begin_close(self, timeout_s: float) -> None:
        """Let the transport end once all messages have left, at the latest after `timeout_s`; returns at once."""

    def close(self, timeout_s: float) -> None:
        """End it: wait at most `timeout_s` for the last messages, and a little for the connection."""


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
