"""Policies on the bus: each version is taken once, never changes, and makes room by itself."""

import asyncio
import hashlib
from pathlib import Path

import msgspec
import pytest
from tests.support import learned
from tests.support.brokers import ConfiguredServer, connected

from dynamix.arbitrator.learned import policy_store
from dynamix.arbitrator.learned.policy_store import PolicyMissingError, PolicyStore
from dynamix.runtime.bus import Bus, StreamFullError, StreamMissingError
from dynamix.runtime.bus.provision import provision
from dynamix.schemas.streams import POLICIES

FIRST, SECOND, *MORE = (learned.policy_file(seeds=(seed,)).to_bytes() for seed in range(5))


async def test_versions_count_up_by_name_and_each_is_read_as_it_was_put(bus: Bus) -> None:
    store = PolicyStore(bus)
    for data in (FIRST, SECOND, *MORE):
        await store.put("mine", data)
        await store.put("mine-2", data)
    for version, data in enumerate((FIRST, SECOND, *MORE), start=1):
        found = await store.get("mine", version)
        assert (found.version, found.digest, found.data) == (version, hashlib.sha256(data).digest(), data)
    assert (await store.get("mine")).version == 5
    listed = [(one.name, one.version) for one in await store.versions()]
    assert listed == [(name, version) for name in ("mine", "mine-2") for version in (5, 4, 3, 2, 1)]
    for absent in (0, 6):
        with pytest.raises(PolicyMissingError, match=f"no version {absent} of mine"):
            await store.get("mine", absent)


async def test_learners_that_put_at_once_each_get_a_version_of_their_own(bus: Bus) -> None:
    files = [FIRST, SECOND, *MORE]
    stored = await asyncio.gather(*[PolicyStore(bus).put("mine", data) for data in files])
    assert sorted(one.version for one in stored) == [1, 2, 3, 4, 5]
    for one, data in zip(stored, files, strict=True):
        assert (await PolicyStore(bus).get("mine", one.version)).data == data


async def test_putting_the_newest_again_makes_no_version(bus: Bus) -> None:
    store = PolicyStore(bus)
    assert [(await store.put("mine", data)).version for data in (FIRST, FIRST, SECOND, FIRST)] == [1, 1, 2, 3]


async def test_versions_of_a_shipped_name_follow_the_shipped_one(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_store, "shipped_names", lambda: ["mine"])
    assert (await PolicyStore(bus).put("mine", FIRST)).version == 2


async def test_the_oldest_version_makes_room_and_a_full_stream_takes_no_other_name(server: ConfiguredServer) -> None:
    size = len(FIRST)
    small = msgspec.structs.replace(POLICIES, max_messages_per_subject=2, max_bytes=3 * size)
    async with connected(server.settings) as bus:
        await provision(bus, [small])
        store = PolicyStore(bus)
        for data in (FIRST, SECOND, *MORE):
            await store.put("mine", data)
        assert [one.version for one in await store.versions()] == [5, 4]
        with pytest.raises(PolicyMissingError):
            await store.get("mine", 3)
        with pytest.raises(StreamFullError):
            await store.put("other", FIRST)


async def test_a_damaged_message_is_refused_and_left_out_of_the_list(bus: Bus) -> None:
    store = PolicyStore(bus)
    await store.put("mine", FIRST)
    await bus.publish_bytes("dynamix.v1.policy.mine", b"no policy", "by hand")
    with pytest.raises(ValueError, match="cannot be read"):
        await store.get("mine")
    assert [one.version for one in await store.versions()] == [1]


async def test_what_was_read_is_kept_by_its_digest(bus: Bus, tmp_path: Path) -> None:
    stored = await PolicyStore(bus).put("mine", FIRST)
    cached = PolicyStore(bus, tmp_path / "cache")
    path = tmp_path / "cache" / f"{stored.digest.hex()}.safetensors"
    assert cached.cached(stored.digest) is None
    await cached.get("mine")
    assert cached.cached(stored.digest) == FIRST
    path.write_bytes(SECOND)
    assert cached.cached(stored.digest) is None
    (tmp_path / "file").write_text("")
    assert (await PolicyStore(bus, tmp_path / "file").get("mine")).data == FIRST


async def test_a_name_or_size_that_cannot_be_is_refused(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="'My policy' cannot be part of a subject"):
        await PolicyStore(bus).put("My policy", FIRST)
    monkeypatch.setattr(policy_store, "MAX_POLICY_BYTES", 10)
    with pytest.raises(ValueError, match="over the limit of 10"):
        await PolicyStore(bus).put("mine", FIRST)


async def test_a_broker_without_the_stream_has_no_policies_and_takes_none(server: ConfiguredServer) -> None:
    async with connected(server.settings) as bus:
        assert (await PolicyStore(bus).versions(), await PolicyStore(bus).find("mine")) == ([], None)
        with pytest.raises(StreamMissingError, match="dynamix provision"):
            await PolicyStore(bus).put("mine", FIRST)
