"""Policies on the bus: versions are taken once, never change, and are announced."""

import asyncio
import hashlib
from pathlib import Path

import msgspec
import pytest
from tests.support import learned
from tests.support.brokers import ConfiguredServer, connected, operate

from dynamix.arbitrator.learned import policy_store
from dynamix.arbitrator.learned.policy_store import BUCKET, PolicyStore
from dynamix.runtime.bus import (
    Bus,
    BusError,
    ObjectBrokenError,
    ObjectMissingError,
    StaleWriterError,
    StreamMissingError,
    object_layout,
)
from dynamix.schemas import subjects
from dynamix.schemas.codec import decode
from dynamix.schemas.messages import PolicyVersion
from dynamix.schemas.streams import FEED, POLICIES

FIRST, SECOND = (learned.policy_file(seeds=(seed,)).to_bytes() for seed in (1, 2))


async def announced(bus: Bus) -> list[PolicyVersion]:
    """Every announcement so far."""
    if (await bus.stream_state(FEED.name)).num_messages == 0:
        return []
    async with bus.consume(FEED.name, [subjects.of("policy", "*")], start="all") as consumer:
        return [decode(PolicyVersion, message.subject, message.payload) for message in await anext(consumer)]


async def test_versions_count_up_and_each_is_read_as_it_was_put(bus: Bus) -> None:
    store = PolicyStore(bus)
    assert [(await store.put("mine", data, feature_version=1)).version for data in (FIRST, SECOND)] == [1, 2]
    assert (await store.get("mine", 1))[1] == FIRST
    newest, data = await store.get("mine")
    assert (newest.version, newest.digest, data) == (2, hashlib.sha256(SECOND).digest(), SECOND)
    assert (newest.num_bytes, newest.feature_version) == (len(SECOND), 1)
    assert [stored.version for stored in await store.versions("mine")] == [2, 1]


async def test_a_new_version_is_announced_with_its_digest_and_place(bus: Bus) -> None:
    await PolicyStore(bus).put("mine", FIRST, feature_version=1)
    assert await announced(bus) == [
        PolicyVersion(
            policy="mine",
            version=1,
            feature_version=1,
            digest=hashlib.sha256(FIRST).digest(),
            location="OBJ_policies/mine/1",
        )
    ]


async def test_learners_that_put_at_once_each_get_a_version_of_their_own(bus: Bus) -> None:
    files = [learned.policy_file(seeds=(seed,)).to_bytes() for seed in range(5)]
    stored = await asyncio.gather(*[PolicyStore(bus).put("mine", data, feature_version=1) for data in files])
    assert sorted(one.version for one in stored) == [1, 2, 3, 4, 5]
    for one, data in zip(stored, files, strict=True):
        assert (await PolicyStore(bus).get("mine", one.version))[1] == data
    assert len(await announced(bus)) == 5


async def test_putting_the_newest_again_makes_no_version(bus: Bus) -> None:
    store = PolicyStore(bus)
    assert [(await store.put("mine", FIRST, feature_version=1)).version for _ in range(2)] == [1, 1]
    await store.put("mine", SECOND, feature_version=1)
    assert (await store.put("mine", FIRST, feature_version=1)).version == 3


async def test_names_do_not_mix_and_foreign_objects_are_left_alone(bus: Bus) -> None:
    store = PolicyStore(bus)
    await store.put("mine", FIRST, feature_version=1)
    await store.put("mine-2", SECOND, feature_version=1)
    for foreign in ("mine", "mine/x", "mine/01", "mine/0", "Mine/1"):
        await bus.objects.put(BUCKET, foreign, b"something else")
    assert [(stored.name, stored.version) for stored in await store.versions()] == [("mine", 1), ("mine-2", 1)]


async def test_an_invalid_description_does_not_break_the_listing_and_its_number_is_not_reused(bus: Bus) -> None:
    for version, said in enumerate(("9" * 5000, "\u00b2", "-1", "one"), start=1):
        await bus.objects.put(BUCKET, f"mine/{version}", FIRST, metadata={"feature_version": said})
    store = PolicyStore(bus)
    assert [(stored.version, stored.feature_version) for stored in await store.versions()] == [
        (version, 0) for version in (4, 3, 2, 1)
    ]
    assert (await store.put("mine", SECOND, feature_version=1)).version == 5


async def test_a_description_filed_under_another_name_is_left_out_and_stepped_over(bus: Bus) -> None:
    info = await bus.objects.put(BUCKET, "other/1", FIRST)
    subject = object_layout.description_subject(BUCKET, "mine/1")
    await bus.publish_bytes(subject, msgspec.json.encode(info), "by hand")
    store = PolicyStore(bus)
    assert [(stored.name, stored.version) for stored in await store.versions()] == [("other", 1)]
    async with asyncio.timeout(10):
        assert (await store.put("mine", SECOND, feature_version=1)).version == 2
    assert (await store.get("other"))[1] == FIRST


async def test_versions_of_a_shipped_name_follow_the_shipped_one(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_store, "shipped_names", lambda: ["mine"])
    assert (await PolicyStore(bus).put("mine", FIRST, feature_version=1)).version == 2


async def test_old_versions_make_room_and_their_numbers_are_not_used_again(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_store, "NUM_KEPT_VERSIONS", 2)
    store = PolicyStore(bus)
    for seed in range(4):
        await store.put("mine", learned.policy_file(seeds=(seed,)).to_bytes(), feature_version=1)
    assert [stored.version for stored in await store.versions("mine")] == [4, 3]
    with pytest.raises(ObjectMissingError, match="the bus has no version 1 of policy 'mine'"):
        await store.get("mine", 1)
    for version in (3, 4):
        await bus.objects.delete(BUCKET, f"mine/{version}")
    assert (await store.put("mine", FIRST, feature_version=1)).version == 5


@pytest.mark.parametrize("error", [StaleWriterError("another writer was faster", 7), ObjectBrokenError("unreadable")])
async def test_room_is_made_before_the_new_version_comes_and_may_be_made_by_others(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, error: BusError
) -> None:
    monkeypatch.setattr(policy_store, "NUM_KEPT_VERSIONS", 1)
    store = PolicyStore(bus)
    await store.put("mine", FIRST, feature_version=1)
    seen: list[tuple[str, list[str]]] = []

    async def refused(bucket: str, name: str) -> None:
        seen.append((name, [info.name for info in await bus.objects.list_all(bucket)]))
        raise error

    monkeypatch.setattr(bus.objects, "delete", refused)
    assert (await store.put("mine", SECOND, feature_version=1)).version == 2
    assert seen == [("mine/1", ["mine/1"])]
    assert [version.version for version in await announced(bus)] == [1, 2]


async def test_what_was_read_is_kept_by_its_digest(bus: Bus, tmp_path: Path) -> None:
    stored = await PolicyStore(bus).put("mine", FIRST, feature_version=1)
    cached = PolicyStore(bus, tmp_path / "cache")
    assert await cached.read(stored) == FIRST
    await operate(bus, f"STREAM.PURGE.{POLICIES.name}")
    assert await cached.read(stored) == FIRST
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [f"{stored.digest.hex()}.safetensors"]


async def test_a_damaged_cache_is_not_believed_and_one_without_room_is_no_matter(bus: Bus, tmp_path: Path) -> None:
    stored = await PolicyStore(bus).put("mine", FIRST, feature_version=1)
    cached = PolicyStore(bus, tmp_path)
    (tmp_path / f"{stored.digest.hex()}.safetensors").write_bytes(SECOND)
    assert cached.cached(stored.digest) is None
    assert await cached.read(stored) == FIRST
    assert cached.cached(stored.digest) == FIRST
    (tmp_path / "file").write_text("")
    assert await PolicyStore(bus, tmp_path / "file").read(stored) == FIRST


async def test_a_name_or_size_that_cannot_be_is_refused(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="'My policy' cannot be part of a subject"):
        await PolicyStore(bus).put("My policy", FIRST, feature_version=1)
    monkeypatch.setattr(policy_store, "MAX_BYTES", 10)
    with pytest.raises(ValueError, match="over the limit of 10"):
        await PolicyStore(bus).put("mine", FIRST, feature_version=1)


async def test_a_broker_without_the_bucket_has_no_policies_and_takes_none(server: ConfiguredServer) -> None:
    async with connected(server.settings) as bus:
        assert await PolicyStore(bus).versions() == []
        with pytest.raises(StreamMissingError, match="dynamix provision"):
            await PolicyStore(bus).put("mine", FIRST, feature_version=1)
