"""Streams from the table: made, left alone, changed, refused."""

import msgspec
import pytest

from dynamix.runtime.bus import Bus, BusError, PublishError
from dynamix.runtime.bus.provision import provision
from dynamix.schemas import subjects
from dynamix.schemas.streams import ACTIONS, FEED
from dynamix.schemas.subjects import KINDS


async def test_each_kind_of_message_has_its_stream(bus: Bus) -> None:
    for kind in KINDS:
        if kind.carrier == "core NATS":
            continue
        subject = ".".join((subjects.ROOT, kind.name, *("x" for _ in kind.tokens)))
        before = (await bus.stream_state(kind.carrier)).last_sequence
        assert await bus.publish_bytes(subject, b"", f"id-{kind.name}") == before + 1


async def test_a_changed_limit_is_updated_and_reported(bus: Bus) -> None:
    shorter = msgspec.structs.replace(FEED, max_age_s=3600.0)
    assert await provision(bus, [shorter]) == ["FEED: updated max_age 86400000000000 -> 3600000000000"]
    assert await provision(bus, [shorter]) == ["FEED: unchanged"]


async def test_what_jetstream_never_changes_is_refused_with_what_to_do(bus: Bus) -> None:
    with pytest.raises(BusError, match=r"stream ACTIONS cannot be made as wanted.*needs a new stream"):
        await provision(bus, [msgspec.structs.replace(ACTIONS, deny_delete=False)])


async def test_a_message_over_the_limit_of_its_stream_is_refused(bus: Bus) -> None:
    with pytest.raises(PublishError, match="message size exceeds maximum allowed"):
        await bus.publish_bytes("dynamix.v1.job.a", bytes(100_000), "large")
    assert await bus.publish_bytes("dynamix.v1.job.a", bytes(60_000), "small") == 1
