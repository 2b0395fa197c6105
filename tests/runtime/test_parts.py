"""The parts of the bus that need no broker: acknowledgement subjects, statuses, positions, rates, logs."""

import contextlib
import io
import logging

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from dynamix.runtime import log, rate_limit
from dynamix.runtime.bus.connection import parse_status
from dynamix.runtime.bus.read import common_filter, parse_delivery
from dynamix.runtime.bus.requests import nanoseconds
from dynamix.runtime.rate_limit import RateLimit
from dynamix.schemas.subjects import covers


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        (b"NATS/1.0\r\nNats-Msg-Id: state:job-1:0:7:node-a\r\n\r\n", "state:job-1:0:7:node-a"),
        (b"NATS/1.0\r\nNats-Msg-Id: report:job-1:node-a:0:7#0123456789abcdef\r\n\r\n", "report:job-1:node-a:0:7"),
        (b"NATS/1.0\r\ntraceparent: nats-msg-id: no\r\nnats-msg-id:x\r\n\r\n", "x"),
        (b"NATS/1.0\r\nNats-Msg-Id: \xff\r\n\r\n", "\ufffd"),
        (None, ""),
    ],
)
def test_a_delivery_holds_its_message_id(headers: bytes | None, expected: str) -> None:
    _, message = parse_delivery(b"s", b"p", b"$JS.ACK.FEED.name.1.42.7.1700000000123456789.3", headers)
    assert message.message_id == expected


@given(st.binary())
def test_arbitrary_deliveries_are_parsed_or_raise_value_error(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        parse_delivery(b"s", b"p", b"$JS.ACK." + data)
    assert parse_status(data).num_pending >= 0
    assert parse_status(b"NATS/1.0 " + data).code >= 0


@pytest.mark.parametrize(
    ("subjects", "common"),
    [
        (["a.b.*"], "a.b.*"),
        (["a.b.c", "a.x.c"], "a.*.c"),
        (["a.b.c", "a.b"], "a.>"),
        (["a.b.c.d", "a.x.>"], "a.*.>"),
        (["a.>", "a.b.c"], "a.>"),
    ],
)
def test_a_common_filter_covers_all_subjects(subjects: list[str], common: str) -> None:
    assert common_filter(subjects) == common
    assert all(covers(common, subject) for subject in subjects)


def test_nanoseconds_of_a_stored_time_are_exact() -> None:
    assert nanoseconds("2023-11-14T22:13:20.123456789Z") == 1_700_000_000_123_456_789
    assert nanoseconds("2023-11-14T22:13:20Z") == 1_700_000_000_000_000_000
    assert nanoseconds("2023-11-14T22:13:20.5Z") == 1_700_000_000_500_000_000


def test_a_rate_limit_lets_a_burst_and_then_so_many_a_second_through(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(rate_limit.time, "monotonic", lambda: now)
    limit = RateLimit(per_s=2.0, burst=3)
    assert [limit.allow("a") for _ in range(5)] == [True, True, True, False, False]
    assert limit.allow("b")
    now += 0.5
    assert [limit.allow("a") for _ in range(2)] == [True, False]
    assert limit.suppressed("a") == 3
    assert limit.suppressed("a") == 0


def test_secrets_never_reach_the_log() -> None:
    stream = io.StringIO()
    log.configure("info", stream)
    structlog.get_logger("test").info("connect to nats://me:hush@host", password="hush", nats_token="hush")
    logging.getLogger("x").info("nats://me:hush@host", extra={"url": "nats://me:hush@host"})
    logging.getLogger("x").error("failed", exc_info=OSError("cannot reach nats://me:hush@host"))
    text = stream.getvalue()
    assert "hush" not in text
    assert text.count("\n") == 3
    assert "me:***@host" in text
