"""Objects on the bus: whole or not at all, readable by nats-py and written by it, refused when anything is wrong."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator

import msgspec
import nats
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.js.errors import ObjectNotFoundError
from nats.js.object_store import ObjectStore
from tests.support.brokers import ConfiguredServer, connected, operate, until
from tests.support.proxy import Proxy

from dynamix.runtime.bus import (
    Bus,
    BusError,
    ObjectBrokenError,
    ObjectInfo,
    ObjectMissingError,
    PublishError,
    StaleWriterError,
    StreamMissingError,
    object_layout,
)
from dynamix.runtime.bus.objects import store as objects
from dynamix.runtime.bus.provision import provision
from dynamix.runtime.bus.requests import Answer
from dynamix.runtime.settings import BusSettings
from dynamix.schemas.streams import POLICIES

BUCKET = POLICIES.bucket
CHUNK = object_layout.CHUNK_BYTES
LARGE = os.urandom(5 * CHUNK + 17)


@pytest.fixture
async def official(server: ConfiguredServer, bus: Bus) -> AsyncIterator[ObjectStore]:
    """nats-py's own object store on the same bucket."""
    assert bus.is_connected  # and the bucket exists
    settings = server.settings
    client = await nats.connect(settings.url, user=settings.user, password=settings.password)
    yield await client.jetstream().object_store(BUCKET)
    await client.close()


async def num_chunks(bus: Bus) -> int:
    """Chunks and descriptions in the bucket."""
    return (await bus.stream_state(POLICIES.name)).num_messages


async def describe(bus: Bus, info: ObjectInfo) -> None:
    """Write a description by hand."""
    subject = object_layout.description_subject(BUCKET, info.name)
    await bus.publish_bytes(subject, msgspec.json.encode(info), os.urandom(4).hex())


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 40 * CHUNK + 5])
async def test_an_object_is_read_as_it_was_written(bus: Bus, size: int) -> None:
    data = os.urandom(size)
    put = await bus.objects.put(BUCKET, "ppo/1", data, metadata={"parent": "ab"})
    assert (put.size, put.chunks, put.metadata) == (size, -(-size // CHUNK), {"parent": "ab"})
    assert await bus.objects.get(BUCKET, "ppo/1") == (put, data)
    assert await bus.objects.info(BUCKET, "ppo/1") == put


async def test_nats_py_reads_what_we_wrote(bus: Bus, official: ObjectStore) -> None:
    for name, data in (("ppo/1", LARGE), ("empty", b"")):
        await bus.objects.put(BUCKET, name, data, metadata={"key": "value"})
        assert (await official.get(name)).data == data  # nats-py checks the digest
    assert [info.name for info in await official.list()] == ["ppo/1", "empty"]


async def test_we_read_what_nats_py_wrote(bus: Bus, official: ObjectStore) -> None:
    await official.put("name with blanks/\N{GREEK SMALL LETTER MU}", LARGE)
    await official.put("gone", b"x")
    await official.delete("gone")
    found = await bus.objects.get(BUCKET, "name with blanks/\N{GREEK SMALL LETTER MU}")
    assert found.data == LARGE
    assert [(info.name, info.deleted) for info in await bus.objects.list_all(BUCKET)] == [
        ("gone", True),
        ("name with blanks/\N{GREEK SMALL LETTER MU}", False),
    ]
    with pytest.raises(ObjectMissingError, match="no object 'gone'"):
        await bus.objects.get(BUCKET, "gone")


async def test_a_replaced_objects_chunks_are_removed(bus: Bus) -> None:
    await bus.objects.put(BUCKET, "a", LARGE)
    assert await num_chunks(bus) == 7
    await bus.objects.put(BUCKET, "a", b"small")
    assert await num_chunks(bus) == 2
    assert (await bus.objects.get(BUCKET, "a")).data == b"small"


async def test_a_name_is_created_once_however_many_try_and_the_losers_leave_nothing(bus: Bus) -> None:
    tries = [bus.objects.put(BUCKET, "ppo/1", os.urandom(3 * CHUNK), create_only=True) for _ in range(6)]
    results = await asyncio.gather(*tries, return_exceptions=True)
    winners = [result for result in results if isinstance(result, ObjectInfo)]
    assert len(winners) == 1
    assert all(isinstance(result, StaleWriterError) for result in results if result not in winners)
    assert (await bus.objects.get(BUCKET, "ppo/1")).info == winners[0]
    assert await num_chunks(bus) == 4


async def test_a_deleted_name_is_not_created_again(bus: Bus, official: ObjectStore) -> None:
    await official.put("ppo/1", b"x")
    await official.delete("ppo/1")
    with pytest.raises(StaleWriterError, match="has an object 'ppo/1' already"):
        await bus.objects.put(BUCKET, "ppo/1", b"y", create_only=True)


async def test_a_deleted_object_is_gone_for_us_and_for_nats_py(bus: Bus, official: ObjectStore) -> None:
    await bus.objects.put(BUCKET, "a", LARGE)
    for _ in range(2):
        await bus.objects.delete(BUCKET, "a")
    await bus.objects.delete(BUCKET, "never there")
    with pytest.raises(ObjectMissingError):
        await bus.objects.get(BUCKET, "a")
    with pytest.raises(ObjectNotFoundError):
        await official.get("a")
    assert await num_chunks(bus) == 1
    await bus.objects.put(BUCKET, "a", b"again")
    assert (await official.get("a")).data == b"again"


async def test_an_object_that_lacks_a_chunk_is_refused_at_once(bus: Bus) -> None:
    await bus.objects.put(BUCKET, "a", LARGE)
    await bus.requests.ask(f"STREAM.MSG.DELETE.{POLICIES.name}", {"seq": 3}, Answer)
    with pytest.raises(ObjectBrokenError, match=r"object 'a' in bucket policies has 5 of its 6 chunks: put it again"):
        await bus.objects.get(BUCKET, "a")


async def test_an_object_whose_bytes_were_exchanged_is_refused(bus: Bus) -> None:
    info = await bus.objects.put(BUCKET, "a", b"what was learned")
    await operate(bus, f"STREAM.PURGE.{POLICIES.name}")
    await bus.publish_bytes(object_layout.chunk_subject(BUCKET, info.nuid), b"What was learned", "forged")
    await describe(bus, info)
    with pytest.raises(ObjectBrokenError, match="does not have the digest"):
        await bus.objects.get(BUCKET, "a")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"size": 1 << 40}, "over the limit"),
        ({"size": 3}, "has 5 bytes where its description says 3"),
        ({"size": 7}, "has 5 bytes where its description says 7"),
        ({"chunks": 2}, "1 of its 2 chunks"),
        ({"digest": "SHA-256=abc"}, "no SHA-256 digest"),
        ({"digest": "MD5=XUFAKrxLKna5cZ2REBfFkg=="}, "no SHA-256 digest"),
        ({"nuid": "a.>"}, "names no upload"),
        ({"options": object_layout.ObjectOptions(link=object_layout.ObjectLink(bucket="b"))}, "only points to another"),
    ],
)
async def test_a_description_that_is_wrong_is_refused(bus: Bus, change: dict[str, object], reason: str) -> None:
    info = await bus.objects.put(BUCKET, "a", b"12345")
    await describe(bus, msgspec.structs.replace(info, **change))
    with pytest.raises(ObjectBrokenError, match=reason):
        await bus.objects.get(BUCKET, "a")


async def test_an_unreadable_description_does_not_affect_other_objects(bus: Bus) -> None:
    await bus.objects.put(BUCKET, "a", b"1")
    await bus.publish_bytes(object_layout.description_subject(BUCKET, "b"), b"{", "broken")
    assert [info.name for info in await bus.objects.list_all(BUCKET)] == ["a"]
    with pytest.raises(ObjectBrokenError, match="cannot be read"):
        await bus.objects.get(BUCKET, "b")


async def test_missing_parts_are_named(server: ConfiguredServer, bus: Bus) -> None:
    assert await bus.objects.list_all(BUCKET) == []
    assert await bus.objects.info(BUCKET, "a") is None
    with pytest.raises(ObjectMissingError, match="bucket policies has no object 'a'"):
        await bus.objects.get(BUCKET, "a")
    async with ConfiguredServer() as bare, connected(bare.settings) as other:
        with pytest.raises(StreamMissingError, match="dynamix provision"):
            await other.objects.put(BUCKET, "a", b"1")
    assert server.pid


@pytest.mark.parametrize(
    ("bucket", "name", "reason"),
    [("a.b", "x", "no name of a bucket"), (BUCKET, "", "1 to 512 bytes"), (BUCKET, "x" * 513, "not 513")],
)
async def test_a_name_that_cannot_be_is_refused(bus: Bus, bucket: str, name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        await bus.objects.put(bucket, name, b"")


async def test_too_large_an_object_is_refused_before_anything_is_sent(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "MAX_OBJECT_BYTES", 10)
    with pytest.raises(ValueError, match="object 'a' of 11 bytes is over the limit of 10"):
        await bus.objects.put(BUCKET, "a", bytes(11))
    await bus.objects.put(BUCKET, "a", bytes(10))
    with pytest.raises(ObjectBrokenError, match="has 10 bytes, over the limit of 9"):
        await bus.objects.get(BUCKET, "a", max_bytes=9)


async def test_a_full_bucket_refuses_an_object_whole(server: ConfiguredServer) -> None:
    small = msgspec.structs.replace(POLICIES, max_bytes=3 * CHUNK)
    async with connected(server.settings) as bus:
        await provision(bus, [small])
        with pytest.raises(PublishError, match="maximum bytes exceeded"):
            await bus.objects.put(BUCKET, "a", LARGE)
        assert await num_chunks(bus) == 0
        await bus.objects.put(BUCKET, "a", bytes(CHUNK))


async def test_an_object_replaced_while_it_is_read_is_read_as_the_new_one(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bus.objects.put(BUCKET, "a", b"old")
    real = objects.count_messages

    async def replace_first(*arguments: object) -> int:
        monkeypatch.setattr(objects, "count_messages", real)
        await bus.objects.put(BUCKET, "a", b"new")
        return await real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(objects, "count_messages", replace_first)
    assert (await bus.objects.get(BUCKET, "a")).data == b"new"


async def test_a_cancelled_upload_leaves_nothing(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = asyncio.Event()
    real = bus._publisher.publish

    async def note(*arguments: object) -> asyncio.Future[int]:
        future = await real(*arguments)  # type: ignore[arg-type]
        if begun.is_set():
            await asyncio.Event().wait()
        begun.set()
        await future
        return future

    monkeypatch.setattr(bus._publisher, "publish", note)
    putting = asyncio.create_task(bus.objects.put(BUCKET, "a", LARGE))
    await begun.wait()
    await asyncio.sleep(0.02)
    putting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await putting
    assert putting.cancelled()
    assert await num_chunks(bus) == 0


async def test_lost_connections_are_bridged_in_both_directions(server: ConfiguredServer, bus: Bus) -> None:
    data = os.urandom(60 * CHUNK)
    async with Proxy(server.port) as proxy:
        settings = BusSettings(url=proxy.url, user=server.settings.user, password=server.settings.password)
        async with connected(settings) as cut:
            putting = asyncio.create_task(cut.objects.put(BUCKET, "a", data))
            await until(lambda: cut.counters["published"] > 3)
            proxy.cut()
            await putting
            assert cut.counters["reconnects"] == 1
            getting = asyncio.create_task(cut.objects.get(BUCKET, "a"))
            await until(lambda: cut.counters["received"] > 0)
            proxy.cut()
            assert (await getting).data == data
    assert (await bus.objects.get(BUCKET, "a")).data == data


async def test_a_reader_finishes_when_the_intake_ends_but_not_when_the_bus_is_closed(
    server: ConfiguredServer, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bus.objects.put(BUCKET, "a", LARGE)
    bus.stop_intake()
    assert (await bus.objects.get(BUCKET, "a")).data == LARGE
    begun = asyncio.Event()

    async def claim_more(*_: object) -> int:
        begun.set()
        return 7

    monkeypatch.setattr(objects, "count_messages", claim_more)
    async with connected(server.settings) as other:
        info = await other.objects.put(BUCKET, "b", LARGE)
        await describe(bus, msgspec.structs.replace(info, chunks=7))
        reading = asyncio.create_task(other.objects.get(BUCKET, "b"))
        await begun.wait()
    with pytest.raises(BusError, match="closed"):
        await reading


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_or_decode_to_a_valid_description(payload: bytes) -> None:
    with contextlib.suppress(ObjectBrokenError):
        info = object_layout.read_description(payload)
        assert info.size >= 0


async def test_a_description_under_another_objects_name_is_refused_and_left_out_of_the_listing(bus: Bus) -> None:
    info = await bus.objects.put(BUCKET, "true", b"content")
    for subject in (object_layout.description_subject(BUCKET, "false"), f"$O.{BUCKET}.M.dHJ1ZQ"):
        await bus.publish_bytes(subject, msgspec.json.encode(info), os.urandom(4).hex())
    assert [found.name for found in await bus.objects.list_all(BUCKET)] == ["true"]
    with pytest.raises(ObjectBrokenError, match="is of another object, 'true'"):
        await bus.objects.get(BUCKET, "false")
    assert (await bus.objects.get(BUCKET, "true")).data == b"content"


async def test_a_description_with_an_invalid_name_is_left_out_of_the_listing(bus: Bus) -> None:
    info = await bus.objects.put(BUCKET, "true", b"content")
    for name in ("", "x" * 600):
        other = msgspec.structs.replace(info, name=name)
        await bus.publish_bytes(f"$O.{BUCKET}.M.{len(name)}", msgspec.json.encode(other), os.urandom(4).hex())
    assert [found.name for found in await bus.objects.list_all(BUCKET)] == ["true"]
