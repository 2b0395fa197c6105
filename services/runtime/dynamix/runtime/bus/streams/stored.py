"""What the broker says about a stream: its state, its configuration, the last message of a subject."""

import datetime as dt
from functools import lru_cache
from typing import Any, Literal

import msgspec

from dynamix.runtime.bus.broker.errors import MESSAGE_NOT_FOUND, ApiError
from dynamix.runtime.bus.broker.requests import BUDGET_S, Answer, Requests

from .copies import StreamCopies
from .message import BusMessage, StreamState


class _State(msgspec.Struct):
    messages: int
    first_seq: int
    last_seq: int
    bytes: int = 0
    first_ts: str = ""
    last_ts: str = ""
    consumer_count: int = 0


class _StreamInfo(Answer):
    state: _State | None = None
    config: dict[str, Any] = msgspec.field(default_factory=dict)
    created: str = ""
    cluster: StreamCopies = StreamCopies()


class _StoredMessage(msgspec.Struct):
    subject: str
    seq: int
    time: str
    data: bytes = b""


class _StoredAnswer(Answer):
    message: _StoredMessage | None = None


class _PurgeAnswer(Answer):
    purged: int = 0


class _ApiUse(msgspec.Struct, frozen=True):
    total: int = 0


class _AccountInfo(Answer):
    api: _ApiUse = _ApiUse()


async def purge_subject(requests: Requests, stream: str, subject: str, *, keep: int = 0) -> int:
    """Remove all messages of a subject but the newest ones to keep; how many. Raises StreamMissingError."""
    return (await requests.ask(f"STREAM.PURGE.{stream}", {"filter": subject, "keep": keep}, _PurgeAnswer)).purged


async def stream_state(requests: Requests, stream: str) -> StreamState:
    """What the stream holds now. Raises StreamMissingError when there is none of this name."""
    info = await requests.ask(f"STREAM.INFO.{stream}", None, _StreamInfo)
    state = info.state
    assert state is not None, "the API answers with an error or a state"
    span_ns = nanoseconds(state.last_ts) - nanoseconds(state.first_ts) if state.messages else 0
    return StreamState(
        state.first_seq,
        state.last_seq,
        state.messages,
        state.bytes,
        span_ns / 1e9,
        num_consumers=state.consumer_count,
        num_replicas=info.config.get("num_replicas", 1),
        copies=info.cluster,
        created=info.created,
    )


async def count_requests(requests: Requests) -> int:
    """How many requests of all users of our account JetStream's API has had since the broker started.

    Requests for messages (MSG.NEXT, DIRECT.GET) are none of the API.
    """
    return (await requests.ask("INFO", None, _AccountInfo)).api.total


async def stream_config(requests: Requests, stream: str) -> dict[str, Any]:
    """The stream's configuration. Raises StreamMissingError when there is none of this name."""
    return (await requests.ask(f"STREAM.INFO.{stream}", None, _StreamInfo)).config


async def write_stream(requests: Requests, action: Literal["CREATE", "UPDATE"], config: dict[str, Any]) -> None:
    """Create or update a stream. Raises ApiError when JetStream refuses."""
    await requests.ask(f"STREAM.{action}.{config['name']}", config, _StreamInfo)


async def last_message(requests: Requests, stream: str, subject: str) -> BusMessage | None:
    """The last message of a subject, `None` when there is none."""
    return await find_message(requests, stream, {"last_by_subj": subject})


async def find_message(
    requests: Requests, stream: str, which: dict[str, Any], *, budget_s: float = BUDGET_S
) -> BusMessage | None:
    """The message that STREAM.MSG.GET finds, `None` when there is none; the stream's leader is asked, not any replica.

    A follower may lag, and a writer that restarts from an old message would only learn so when its compare-and-set
    fails.
    """
    try:
        answer = await requests.ask(f"STREAM.MSG.GET.{stream}", which, _StoredAnswer, budget_s=budget_s)
    except ApiError as error:
        if error.err_code == MESSAGE_NOT_FOUND:
            return None
        raise
    stored = answer.message
    assert stored is not None, "the API answers with an error or a message"
    return BusMessage(stored.subject, stored.data, stored.seq, nanoseconds(stored.time), 0)


async def newest_message(requests: Requests, stream: str, subject: str) -> BusMessage | None:
    """The last message of a subject, from any replica, which may lag behind the leader; `None` when there is none.

    The subject stands in the request's own subject, so that permissions can limit it to one job.
    """
    found = await requests.ask_directly(stream, subject)
    if found is None:
        return None
    headers, payload = found
    _, _, place = headers.rpartition(b"\r\nNats-Sequence:")  # the sender may have written one before the broker's
    return BusMessage(subject, payload, int(place.partition(b"\r\n")[0]), 0, 0, headers)


def nanoseconds(time: str) -> int:
    """Since the Unix epoch, of the broker's RFC 3339 time with up to nine digits; `datetime` holds six."""
    seconds, _, fraction = time.removesuffix("Z").partition(".")
    return _whole_seconds(seconds) * 10**9 + int(fraction.ljust(9, "0"))


@lru_cache(maxsize=64)  # messages that are read together were stored together
def _whole_seconds(time: str) -> int:
    return int(dt.datetime.fromisoformat(time).replace(tzinfo=dt.UTC).timestamp())
