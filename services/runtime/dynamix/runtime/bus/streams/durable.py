"""Reading by a durable consumer: the broker keeps what was acknowledged, and a restart goes on behind it.

The consumer is of the kind that serves one pinned client at a time. So each delivery has a header, `Nats-Pin-Id`: an
empty message without headers would end the answers to a request where it passes from one account to another. A second
process of the same name waits until the first one has asked for nothing for `PINNED_S`.
"""

import collections
import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from dynamix.runtime.bus.broker.client import NOT_FOUND, REQUEST_EXPIRED, parse_status
from dynamix.runtime.bus.broker.connection import BrokerConnection
from dynamix.runtime.bus.broker.errors import CONSUMER_NOT_FOUND, ApiError, BusError, PermissionDeniedError
from dynamix.runtime.bus.broker.requests import Answer, Requests
from dynamix.schemas.streams import FEED

from .message import BusMessage, parse_delivery
from .reader import MAX_BYTES, LostError, Reader

MAX_ACK_PENDING = 65_536
ACK_WAIT_S = 24 * 3600.0
"""Redelivery by time is not wanted: the reset at each opening delivers again, in order, what was not acknowledged."""
EXPIRES_S = 1.5
"""A request ends after so long: shorter than `PINNED_S`, so that an idle reader stays pinned."""
PINNED_S = 2.0
GROUP = "r"
WRONG_PIN = 423
REQUEST_ENDED = {"Batch Completed", "Message Size Exceeds MaxBytes"}
"""Descriptions of status 409 that end one request; all others end the consumer or its leader's reign."""

_PIN = re.compile(rb"\r\nNats-Pin-Id: ?([^\r]*)")


class _ConsumerInfo(Answer):
    config: dict[str, Any] = msgspec.field(default_factory=dict)


async def make_durable(
    requests: Requests,
    name: str,
    filter: str,  # noqa: A002 - the broker's word
    *,
    stream: str = FEED.name,
    start: Literal["new", "all"] | int = "new",
) -> None:
    """Make a durable consumer of a stream, or give a present one our settings and the filter.

    `start` counts for a new one. Where the stream was just made, `"all"` loses nothing that comes before this call.

    Raises:
        StreamMissingError: when there is no such stream.
        PermissionDeniedError: when our user may not.
        BusError: as `Requests.ask`.
    """
    try:
        present = (await requests.ask(f"CONSUMER.INFO.{stream}.{name}", None, _ConsumerInfo)).config
    except ApiError as error:
        if error.err_code != CONSUMER_NOT_FOUND:
            raise
        present = {"name": name, "durable_name": name, "deliver_policy": start}
        if isinstance(start, int):
            present |= {"deliver_policy": "by_start_sequence", "opt_start_seq": max(start, 1)}
    wanted = _settings(filter)
    if any(present.get(key) != value for key, value in wanted.items()):
        # the filter stands in the subject, too, so that permissions can limit it
        operation = f"CONSUMER.CREATE.{stream}.{name}.{filter}"
        await requests.ask(operation, {"stream_name": stream, "config": present | wanted}, _ConsumerInfo)


async def remove_durable(requests: Requests, name: str) -> None:
    """Remove a durable consumer of FEED, where there is one."""
    try:
        await requests.ask(f"CONSUMER.DELETE.{FEED.name}.{name}", None, Answer)
    except ApiError as error:
        if error.err_code != CONSUMER_NOT_FOUND:
            raise


def _settings(subject: str) -> dict[str, Any]:
    return {
        "ack_policy": "all",
        "ack_wait": int(ACK_WAIT_S * 1e9),
        "max_ack_pending": MAX_ACK_PENDING,
        "filter_subject": subject,
        "priority_groups": [GROUP],
        "priority_policy": "pinned_client",
        "priority_timeout": int(PINNED_S * 1e9),
    }


class DurableReader(Reader):
    """Reads by a durable consumer of one filter; makes it where it is missing and our user may."""

    def __init__(
        self,
        connection: BrokerConnection,
        requests: Requests,
        stream: str,
        subjects: Sequence[str],
        *,
        durable: str,
        **options: Any,
    ) -> None:
        super().__init__(connection, requests, stream, subjects, **options)
        if len(self._subjects) != 1 or self._start == "last_per_subject":
            raise ValueError(f"a durable consumer reads one filter, from 'new', 'all' or a sequence, not {subjects}")
        self._name = durable
        self._operation = f"CONSUMER.MSG.NEXT.{stream}.{durable}"
        self._pin = ""
        self._next_delivery = 1
        """The consumer's count of its next delivery, which begins at 1 after each reset. A delivery 1 is always taken:
        before the reset's answer it may come by a request that was made earlier."""
        self._lost = ""
        """What did not come, since the last reset."""
        self._num_asked = 0
        """Messages of the present request that are still to come."""
        self._handled = 0
        """The last sequence that was acknowledged."""
        self._since_ns = 0
        """When the stream was made, where we have read another one before."""
        self._unacknowledged: collections.deque[tuple[int, bytes]] = collections.deque()

    async def ack(self, message: BusMessage) -> None:
        """Acknowledge this and every earlier message; a restart goes on behind it.

        An acknowledgement lost with the connection is made good when its message comes again.
        """
        if message.timestamp_ns < self._since_ns:
            return  # its sequence is another message's now
        self._handled = max(self._handled, message.sequence)
        await self._acknowledge()

    async def _acknowledge(self) -> None:
        reply = b""
        while self._unacknowledged and self._unacknowledged[0][0] <= self._handled:
            reply = self._unacknowledged.popleft()[1]
        if reply:
            await self._connection.send(reply.decode(), b"+ACK")

    async def _open(self) -> None:
        self._pin = ""
        is_first = not self._created
        state = await self._check_stream()
        if self._start == "new":
            self._start = state.last_sequence + 1
        self._unacknowledged.clear()
        place = f"{self._stream}.{self._name}"
        start = self._last + 1 if self._last else self._start
        assert start != "last_per_subject", "refused above"
        try:
            await make_durable(self._requests, self._name, self._subjects[0], stream=self._stream, start=start)
        except PermissionDeniedError as error:
            missing = f"{self._stream} has no consumer {self._name} with our settings, and our user may not make it"
            text = f"{missing}: `dynamix keys create` or `dynamix provision` makes it ({error})"
            raise (PermissionDeniedError(text) if is_first else BusError(text)) from error
        self._next_delivery = 1
        await self._requests.ask(f"CONSUMER.RESET.{place}", None, _ConsumerInfo)
        self._lost = ""

    def _begin_again(self, created_ns: int) -> None:
        self._start, self._handled, self._since_ns = "all", 0, created_ns

    async def _read_once(self, num_messages: int) -> None:
        if self._lost:
            raise LostError(self._lost)
        self._num_asked = num_messages
        request = {
            "batch": num_messages,
            "max_bytes": MAX_BYTES,
            "expires": int(EXPIRES_S * 1e9),
            "group": GROUP,
            **({"id": self._pin} if self._pin else {}),
        }
        status = parse_status(await self._exchange(self._operation, request, EXPIRES_S))
        if status.code == WRONG_PIN:
            self._pin = ""
        elif status.code and status.code not in (NOT_FOUND, REQUEST_EXPIRED) and status.text not in REQUEST_ENDED:
            raise LostError(f"{status.code} {status.text}".strip())
        await self._acknowledge()  # what came again

    def _on_message(self, subject: bytes, reply: bytes, payload: bytes, headers: bytes | None) -> None:
        self._num_answers += 1
        if not reply:
            if subject == self._answered_on:
                self._end_exchange(headers or b"")
            return
        count, message = parse_delivery(subject, payload, reply, headers)
        if count not in (1, self._next_delivery):
            self._lost = f"delivery {self._next_delivery} was lost"
            if self._answer is not None and not self._answer.done():
                self._interrupt(LostError(self._lost))
            return
        self._next_delivery = count + 1
        if headers is not None and (pin := _PIN.search(headers, headers.rfind(b"\r\nNats-Pin-Id:"))) is not None:
            self._pin = pin[1].decode()
        self._unacknowledged.append((message.sequence, reply))
        if message.sequence > self._last:
            self._queue(message)
        else:
            self._counters["received_twice"] += 1
        self._num_asked -= 1
        if not self._num_asked:
            self._end_exchange(b"")

    def _deniable(self) -> tuple[str, ...]:
        return f"{self._inbox}.*".lower(), f"{self._connection.api}{self._operation}".lower()
