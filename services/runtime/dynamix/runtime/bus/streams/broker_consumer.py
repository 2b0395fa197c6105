"""The broker's side of a consumer: made, or reset, so that it delivers from the right place, `StreamPosition`."""

import itertools
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from dynamix.runtime.bus.broker.connection import BrokerConnection
from dynamix.runtime.bus.broker.errors import CONSUMER_NOT_FOUND, ApiError, NoAnswerError, SequenceRegressError
from dynamix.runtime.bus.broker.requests import BUDGET_S, Answer, Requests

from .failover import FailoverWait
from .message import StreamState
from .stored import find_message, stream_state

logger = logging.getLogger(__name__)

INACTIVE_THRESHOLD_S = 60.0
CREATE_BUDGET_S = 3.0
"""So long one name of an unnamed consumer is asked for; then another one."""
LOOK_BUDGET_S = 1.0
MAX_ACK_PENDING = 65_536
ACK_WAIT_S = 24 * 3600.0
"""Redelivery by time is not wanted: the reset at each opening delivers again, in order, what was not acknowledged."""

Start = Literal["new", "all", "last_per_subject"] | int
"""Where to begin: from now on, at the beginning, with each subject's last message, or at a sequence."""


_numbers = itertools.count(1)


class StreamPosition:
    """The last sequence handed out, and the start that was asked for as long as there is none.

    `"new"` is pinned to a sequence at the first opening, so that what is published while the first consumer is lost is
    read by the second. After an interruption `"last_per_subject"` goes on with everything behind the last message read.
    """

    def __init__(self, start: Start) -> None:
        self._start = start
        self.last = 0

    @property
    def needs_pin(self) -> bool:
        """Whether `pin` must be called before `policy`."""
        return self._start == "new" and not self.last

    def pin(self, last_sequence: int) -> None:
        """Fix what `"new"` means: everything behind `last_sequence`."""
        self._start = last_sequence + 1

    def accepts(self, sequence: int) -> bool:
        """Whether the message is a new one; if so it becomes the last."""
        if sequence <= self.last:
            return False
        self.last = sequence
        return True

    @property
    def first_wanted(self) -> int:
        """The first sequence that may be delivered now."""
        return self.last + 1 if self.last else max(self._start, 1) if isinstance(self._start, int) else 1

    def policy(self) -> dict[str, str | int]:
        """The delivery policy of a consumer's configuration."""
        if self.last:
            return _by_sequence(self.last + 1)
        if isinstance(self._start, int):
            return _by_sequence(max(self._start, 1))
        return {"deliver_policy": self._start}


class _Sequences(msgspec.Struct):
    consumer_seq: int = 0
    stream_seq: int = 0


class _ConsumerInfo(Answer):
    config: dict[str, Any] = msgspec.field(default_factory=dict)
    delivered: _Sequences = msgspec.field(default_factory=_Sequences)


@dataclass(kw_only=True)
class BrokerConsumer:
    """Makes a new unnamed consumer at each opening, or resets a durable one to its last acknowledgement."""

    connection: BrokerConnection
    requests: Requests
    stream: str
    subjects: tuple[str, ...]
    durable: str | None
    position: StreamPosition
    """What was handed out so far."""
    num_replicas: int = 1
    """Copies of the stream at the last opening."""

    async def open(self) -> tuple[str, int]:
        """The consumer's name, and the count that its next delivery will carry.

        Raises:
            StreamMissingError: when there is no such stream.
            SequenceRegressError: when the stream ends before our position.
            BusError: as `Requests.ask`.
        """
        if self.durable is not None:
            return self.durable, await self._reset_durable() + 1
        await self._check_position()
        until = time.monotonic() + BUDGET_S
        while True:
            try:
                return await self._create_unnamed(), 1
            except NoAnswerError:
                if time.monotonic() > until:
                    raise

    async def find_owed(self) -> int:
        """The sequence of a message for us, behind our position, that the stream's leader holds; 0: there is none.

        Raises:
            BusError: as `Requests.ask`.
        """
        for subject in self.subjects:
            which = {"seq": self.position.first_wanted, "next_by_subj": subject}
            found = await find_message(self.requests, self.stream, which, budget_s=LOOK_BUDGET_S)
            if found is not None:
                return found.sequence
        return 0

    async def forget(self, name: str) -> None:
        """Remove an unnamed consumer. No answer is waited for: the broker removes it anyway when it stays unused."""
        await self.connection.send(f"{self.connection.api}CONSUMER.DELETE.{self.stream}.{name}", b"")

    async def _create_unnamed(self) -> str:
        """Create a consumer under a name that was never asked for before.

        A cluster places it on one server. If that one has just died, there is no answer, however often the same name is
        asked for, until it is back: another name is placed again.
        """
        name = f"{self.connection.inbox.removeprefix('_INBOX.').replace('.', '-')}-{next(_numbers)}"
        config = {
            "name": name,
            "ack_policy": "none",
            "inactive_threshold": int(INACTIVE_THRESHOLD_S * 1e9),
            "mem_storage": True,
            **self._filter(),
            **self.position.policy(),
        }
        await self._write(config, "create", budget_s=CREATE_BUDGET_S)
        return name

    async def _reset_durable(self) -> int:
        """Make the durable deliver again from behind its last acknowledgement; returns its deliveries so far."""
        place = f"{self.stream}.{self.durable}"
        try:
            info = await self.requests.ask(f"CONSUMER.INFO.{place}", None, _ConsumerInfo)
        except ApiError as error:
            if error.err_code != CONSUMER_NOT_FOUND:
                raise
            await self._check_position()
            config = {"durable_name": self.durable, "name": self.durable, "ack_policy": "all"}
            await self._write(config | self._limits() | self._filter() | self.position.policy(), "create")
            return 0
        await self._check_position()
        wanted = self._limits() | self._filter()
        if any(info.config.get(key) != value for key, value in wanted.items()):
            kept = {key: value for key, value in info.config.items() if not key.startswith("filter_subject")}
            await self._write(kept | wanted, "update")
        return (await self.requests.ask(f"CONSUMER.RESET.{place}", None, _ConsumerInfo)).delivered.consumer_seq

    async def _check_position(self) -> None:
        """Pin what "new" means, and see that the stream still reaches to where we are."""
        state, last = await self._state(self.stream), self.position.last
        wait = FailoverWait(self._state, self.stream)
        while last > state.last_sequence and await wait.pause():
            state = await self._state(self.stream)
        self.num_replicas = state.num_replicas
        if self.position.needs_pin:
            self.position.pin(state.last_sequence)
        if last > state.last_sequence:
            raise SequenceRegressError(
                f"{self.stream} ends at {state.last_sequence}, but {last} was already read from it: the broker lost "
                "data or the stream was recreated; restart this service to begin again"
            )
        if last and last + 1 < state.first_sequence:
            logger.warning("%s no longer holds what follows %d; on from %d", self.stream, last, state.first_sequence)

    async def _state(self, stream: str) -> StreamState:
        return await stream_state(self.requests, stream)

    async def _write(self, config: Mapping[str, Any], action: str, *, budget_s: float = BUDGET_S) -> None:
        """Create or update. With one filter it stands in the API's subject, so that permissions can limit it."""
        operation = f"CONSUMER.CREATE.{self.stream}.{config['name']}"
        if "filter_subject" in config:
            operation += f".{config['filter_subject']}"
        body = {"stream_name": self.stream, "config": config, "action": action}
        await self.requests.ask(operation, body, _ConsumerInfo, budget_s=budget_s)

    def _filter(self) -> dict[str, Any]:
        if len(self.subjects) == 1:
            return {"filter_subject": self.subjects[0]}
        return {"filter_subjects": list(self.subjects)}

    def _limits(self) -> dict[str, Any]:
        return {"ack_wait": int(ACK_WAIT_S * 1e9), "max_ack_pending": MAX_ACK_PENDING}


def _by_sequence(sequence: int) -> dict[str, str | int]:
    return {"deliver_policy": "by_start_sequence", "opt_start_seq": sequence}
