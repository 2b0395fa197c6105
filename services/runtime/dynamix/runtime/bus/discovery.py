"""Discovery and statistics as NATS's own service protocol has them (ADR-32): `nats micro ls`, `info`, `stats`.

A service answers on `$SRV.PING`, `$SRV.INFO` and `$SRV.STATS`, each for all, for its name, and for its id. nats-py's
`add_service` needs callbacks that our client takes away, knows requests only, and would put our streams' messages
nowhere: here an endpoint is a kind of message that the service reads from a stream, and cannot be called.
"""

import asyncio
import collections
import datetime as dt
import logging
import secrets
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import msgspec

from dynamix.runtime.rate_limit import RateLimit
from dynamix.schemas.kinds import BY_NAME
from dynamix.schemas.subjects import ROOT, all_of

from .broker.connection import BrokerConnection
from .broker.errors import BusError, PermissionDeniedError
from .streams.statistics import HandlingStatistics, StatisticsByKind

logger = logging.getLogger(__name__)

PREFIX = "$SRV"
VERBS = ("PING", "INFO", "STATS")
MAX_QUEUED = 64
"""Requests that wait; further ones are not answered."""
REPLIES = "_INBOX."
"""Answers go to inboxes only: otherwise a request could have us publish on any subject that is ours."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """The identity that a service answers with."""

    name: str
    """Shared by all its instances: `dynamix-<service>`."""
    version: str
    description: str
    metadata: dict[str, str]
    id: str = msgspec.field(default_factory=lambda: secrets.token_hex(8))
    """Names this process."""
    started: dt.datetime = msgspec.field(default_factory=lambda: dt.datetime.now(dt.UTC))


class Discovery:
    """Answers with the service's identity and statistics while `answer` runs."""

    def __init__(self, connection: BrokerConnection, identity: Identity, statistics: StatisticsByKind) -> None:
        self._connection = connection
        self._identity = identity
        self._statistics = statistics
        self._questions: collections.deque[tuple[str, str]] = collections.deque(maxlen=MAX_QUEUED)
        self._asked = asyncio.Event()
        self._limit = RateLimit(per_s=1.0)

    async def answer(self) -> None:
        """Listen and answer until cancelled. A service that cannot be discovered still works: the log says why."""
        async with AsyncExitStack() as stack:
            stack.callback(self._connection.when_denied(self._on_denied))
            try:
                for verb in VERBS:
                    for subject in subjects_of(verb, self._identity):
                        subscription = await self._connection.subscribe(subject, partial(self._on_question, verb))
                        stack.push_async_callback(self._connection.unsubscribe, subscription)
            except BusError as error:
                logger.warning("`nats micro` will not find this service: %s", error)
                return
            while True:
                await self._asked.wait()
                self._asked.clear()
                while self._questions:
                    await self._answer_one(*self._questions.popleft())

    def _on_question(self, verb: str, _subject: bytes, reply: bytes, _payload: bytes, _headers: bytes | None) -> None:
        to = reply.decode(errors="replace")
        if to.startswith(REPLIES) and len(self._questions) < MAX_QUEUED:
            self._questions.append((verb, to))
            self._asked.set()

    async def _answer_one(self, verb: str, reply: str) -> None:
        try:
            await self._connection.send(reply, msgspec.json.encode(answer_to(verb, self._identity, self._statistics)))
        except BusError as error:
            logger.debug("no answer to %s: %s", verb, error)

    def _on_denied(self, subject: str, denial: PermissionDeniedError) -> None:
        if subject.startswith(PREFIX.lower()) and self._limit.allow("denied"):
            logger.warning("`nats micro` will not find this service: %s", denial)


def subjects_of(verb: str, identity: Identity) -> tuple[str, str, str]:
    """Where a verb is asked: of all services, of those of our name, of us alone."""
    everybody = f"{PREFIX}.{verb}"
    return everybody, f"{everybody}.{identity.name}", f"{everybody}.{identity.name}.{identity.id}"


def answer_to(verb: str, identity: Identity, statistics: StatisticsByKind) -> dict[str, Any]:
    """The answer to a verb, in the protocol's words."""
    answer: dict[str, Any] = {
        "type": f"io.nats.micro.v1.{verb.lower()}_response",
        "name": identity.name,
        "id": identity.id,
        "version": identity.version,
        "metadata": identity.metadata,
    }
    if verb == "INFO":
        answer |= {"description": identity.description, "endpoints": [_described(kind) for kind in statistics.all()]}
    elif verb == "STATS":
        answer |= {
            "started": identity.started.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "endpoints": [_counted(kind) for kind in statistics.all()],
        }
    return answer


def _endpoint(statistics: HandlingStatistics) -> dict[str, Any]:
    subject = all_of(statistics.kind) if statistics.kind in BY_NAME else f"{ROOT}.>"
    return {"name": statistics.kind, "subject": subject, "queue_group": ""}


def _described(statistics: HandlingStatistics) -> dict[str, Any]:
    stream = BY_NAME[statistics.kind].carrier if statistics.kind in BY_NAME else ""
    return _endpoint(statistics) | {"metadata": {"stream": stream, "answers_requests": "no"}}


def _counted(statistics: HandlingStatistics) -> dict[str, Any]:
    return _endpoint(statistics) | {
        "num_requests": statistics.num_messages,
        "num_errors": statistics.num_errors,
        "last_error": statistics.last_error,
        "processing_time": statistics.processing_ns,
        "average_processing_time": statistics.processing_ns // max(1, statistics.num_messages),
        "data": None,
    }
