"""Pipelined pull: ask the broker for many messages, take them as they come, ask again before they run out.

One `Pull` is one incarnation of a consumer: it counts what is still owed to it, and is given up at the first sign that
a delivery was lost. Those of a durable consumer share an inbox: the broker may hold requests of an earlier one for up
to `EXPIRES_S`, since across accounts it does not see that there is no listener, and gives them what comes next.
"""

import itertools
import logging
from typing import TYPE_CHECKING

import msgspec
from nats.aio.subscription import Subscription as NatsSubscription

from dynamix.runtime.bus.broker.client import HEARTBEAT, NOT_FOUND, REQUEST_EXPIRED, Status, parse_status
from dynamix.runtime.bus.broker.connection import BrokerConnection

from .message import parse_delivery

if TYPE_CHECKING:
    from .consumer import Consumer

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
EXPIRES_S = 30.0
MAX_BYTES = 4 << 20
"""Limit of one request: bounds what is in flight. The broker cuts a connection with 64 MB of pending data."""

REQUEST_ENDED = {"Batch Completed", "Message Size Exceeds MaxBytes"}
"""Descriptions of status 409 that end one request; all others end the consumer or its leader's reign."""

_inboxes = itertools.count(1)


def new_inbox(connection: BrokerConnection) -> str:
    """Where nothing is delivered yet."""
    return f"{connection.inbox}.p.{next(_inboxes)}"


class Pull:
    """Requests for the messages of one consumer.

    Attributes:
        consumer: the consumer's name, once it has begun.
        num_asked: messages asked for and not delivered yet.
        quiet_beats: heartbeat intervals since the last message, with an open request.
        subjects: subjects (in small letters) that this pull may be denied.
    """

    def __init__(self, connection: BrokerConnection, stream: str, inbox: str, reader: "Consumer") -> None:
        self.consumer = ""
        self.num_asked = 0
        self.quiet_beats = 0
        self._connection = connection
        self._stream = stream
        self._request_subject = ""
        self._inbox = inbox
        self._next_delivery = 0
        self._early: list[tuple[bytes, bytes, bytes, bytes | None]] = []
        """What came before it is known which delivery is the first."""
        self._reader = reader
        self._stopped = False
        self._silent_beats = 0
        self._subscription: NatsSubscription | None = None
        self.subjects = frozenset((self._inbox.lower(),))

    @property
    def has_begun(self) -> bool:
        """Whether it is known which consumer it asks, and from which delivery on."""
        return bool(self.consumer)

    async def listen(self) -> None:
        """Keep deliveries until it begins."""
        self._subscription = await self._connection.subscribe(self._inbox, self._on_message)

    def begin(self, consumer: str, next_delivery: int) -> None:
        """Take deliveries of a consumer from its count `next_delivery` on."""
        self.consumer, self._next_delivery = consumer, next_delivery
        self._request_subject = f"{self._connection.api}CONSUMER.MSG.NEXT.{self._stream}.{consumer}"
        self.subjects |= {self._request_subject.lower()}
        early, self._early = self._early, []
        for subject, reply, payload, headers in early:
            if reply and parse_delivery(subject, payload, reply)[0] >= next_delivery:  # an older one comes again
                self._on_message(subject, reply, payload, headers)

    async def close(self) -> None:
        """Take nothing more, and stop listening."""
        self._stopped = True
        if self._subscription is not None:
            await self._connection.unsubscribe(self._subscription)
            self._subscription = None

    def stop(self) -> None:
        """Take nothing more: a delivery was lost, and what follows will be delivered again."""
        self._stopped = True

    async def ask(self, num_messages: int) -> None:
        """Ask for up to so many messages."""
        self.num_asked += num_messages
        request = {
            "batch": num_messages,
            "max_bytes": MAX_BYTES,
            "expires": int(EXPIRES_S * 1e9),
            "idle_heartbeat": int(HEARTBEAT_S * 1e9),
        }
        await self._connection.send(self._request_subject, msgspec.json.encode(request), self._inbox)

    def count_silence(self) -> int:
        """Called once per heartbeat interval: how many have passed since the broker last said anything.

        Counted in calls, not in seconds: an event loop that was blocked for a minute sees one silent interval, and the
        next thing it does is to read what came meanwhile. Without an open request the broker owes us nothing.
        """
        self._silent_beats = self._silent_beats + 1 if self.num_asked > 0 else 0
        self.quiet_beats = self.quiet_beats + 1 if self.num_asked > 0 else 0
        return self._silent_beats

    def _on_message(self, subject: bytes, reply: bytes, payload: bytes, headers: bytes | None) -> None:
        if self._stopped:
            return
        if not self.has_begun:
            self._early.append((subject, reply, payload, headers))
            return
        self._silent_beats = 0
        if not reply:
            self._on_status(parse_status(headers or b""))
            return
        count, message = parse_delivery(subject, payload, reply, headers)
        if count != self._next_delivery:
            self._reader.break_off(f"delivery {self._next_delivery} was lost")
            return
        self._next_delivery += 1
        self.quiet_beats = 0
        self.num_asked = max(0, self.num_asked - 1)  # it may be of a request that an earlier pull made
        self._reader.accept(message, reply)

    def _on_status(self, status: Status) -> None:
        """A request ended before it was filled (and says how much is left), or the broker only shows that it lives."""
        if status.code == HEARTBEAT:
            return
        if status.code in {NOT_FOUND, REQUEST_EXPIRED} or status.text in REQUEST_ENDED:
            self.num_asked = max(0, self.num_asked - status.num_pending)
            self._reader.want_more()
        else:
            self._reader.break_off(f"{status.code} {status.text}".strip())
