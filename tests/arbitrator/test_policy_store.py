"""Policies on the bus: each version is taken once and never changes; a generation keeps the one that it began with."""

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from tests.support import examples, learned
from tests.support.brokers import ConfiguredServer, connected

from dynamix.arbitrator.learned import policy_file, policy_store
from dynamix.arbitrator.learned.policy_file import PolicyFile
from dynamix.arbitrator.learned.policy_store import PolicyStore
from dynamix.arbitrator.policies.policy import Policy, digest_of
from dynamix.arbitrator.policies.registry import POLICIES as CODE
from dynamix.runtime.bus import Bus, StreamFullError, StreamMissingError
from dynamix.runtime.bus.provision import provision
from dynamix.schemas import subjects
from dynamix.schemas.messages import Action, Job
from dynamix.schemas.streams import POLICIES

Ship = Callable[[str, bytes], None]
JOB = examples.job(policy="mine")
FIRST, SECOND, THIRD, *MORE = (learned.policy_file(seeds=(seed,)).to_bytes() for seed in range(5))


def asking(version: float) -> Job:
    return examples.job(policy="mine", policy_options={"version": version})


@pytest.fixture
def source(bus: Bus) -> PolicyStore:
    return PolicyStore(bus)


@pytest.fixture
def ship(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ship:
    """Has a policy come with the package."""
    monkeypatch.setattr(policy_file, "shipped_directory", lambda: tmp_path)

    def write(name: str, data: bytes) -> None:
        (tmp_path / f"{name}.safetensors").write_bytes(data)

    return write


def decided_by(policy: Policy) -> Action:
    """An action of this generation, decided by a policy."""
    return examples.action(policy=policy.name, policy_version=policy.version, policy_digest=digest_of(policy))


async def test_versions_count_up_by_name_and_each_is_read_as_it_was_put(source: PolicyStore) -> None:
    for data in (FIRST, FIRST, SECOND, THIRD):  # the newest again makes no version
        await source.put("mine", data)
        await source.put("mine-2", data)
    for version, data in enumerate((FIRST, SECOND, THIRD), start=1):
        found = await source.find("mine", version)
        assert found is not None
        assert (found.version, found.digest, found.data) == (version, hashlib.sha256(data).digest(), data)
    listed = [(one.name, one.version) for one in await source.versions()]
    assert listed == [(name, version) for name in ("mine", "mine-2") for version in (3, 2, 1)]
    assert await source.find("mine", 4) is None


async def test_learners_that_put_at_once_each_get_a_version_of_their_own(bus: Bus) -> None:
    files = [FIRST, SECOND, THIRD, *MORE]
    stored = await asyncio.gather(*[PolicyStore(bus).put("mine", data) for data in files])
    assert sorted(one.version for one in stored) == [1, 2, 3, 4, 5]
    listed = {one.version: one.data for one in await PolicyStore(bus).versions()}
    assert listed == {one.version: data for one, data in zip(stored, files, strict=True)}


async def test_the_oldest_version_makes_room_and_a_full_stream_takes_no_other_name(server: ConfiguredServer) -> None:
    small = msgspec.structs.replace(POLICIES, max_messages_per_subject=2, max_bytes=3 * len(FIRST))
    async with connected(server.settings) as bus:
        store = PolicyStore(bus)
        assert (await store.versions(), await store.find("mine")) == ([], None)  # there is no stream
        with pytest.raises(StreamMissingError):
            await store.put("mine", FIRST)
        await provision(bus, [small])
        for data in (FIRST, SECOND, THIRD):
            await store.put("mine", data)
        assert [one.version for one in await store.versions()] == [3, 2]
        with pytest.raises(StreamFullError):
            await store.put("other", FIRST)


async def test_a_damaged_message_and_what_cannot_be_a_policy_are_refused(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = PolicyStore(bus)
    await store.put("mine", FIRST)
    await bus.publish_bytes("dynamix.v1.policy.mine", b"no policy", "by hand")
    with pytest.raises(ValueError, match="cannot be read"):
        await store.find("mine")
    assert [one.version for one in await store.versions()] == [1]
    with pytest.raises(ValueError, match="'My policy' cannot be part of a subject"):
        await store.put("My policy", FIRST)
    monkeypatch.setattr(policy_store, "MAX_POLICY_BYTES", 10)
    with pytest.raises(ValueError, match="over the limit of 10"):
        await store.put("other", FIRST)


async def test_a_generation_begins_with_the_newest_version_and_keeps_it(bus: Bus, source: PolicyStore) -> None:
    await source.put("mine", FIRST)
    second = await source.put("mine", SECOND)
    policy = await source.choose(JOB, None)
    assert (policy.name, policy.version, digest_of(policy)) == ("mine", 2, second.digest)
    await source.put("mine", THIRD)
    for reader in (source, PolicyStore(bus)):  # the same process, and one that was restarted
        again = await reader.choose(JOB, decided_by(policy))
        assert (again.version, digest_of(again)) == (2, second.digest)
    assert (await source.choose(JOB, None)).version == 3
    assert (await source.choose(asking(1.0), None)).version == 1
    with pytest.raises(ValueError, match=r"version 7 of policy 'mine' does not exist: there is 3, 2, 1"):
        await source.choose(asking(7.0), None)
    for version in (1.5, float("nan")):
        with pytest.raises(ValueError, match=r"option version=.* of policy 'mine' must be a whole number from 1"):
            await source.choose(asking(version), None)


async def test_the_shipped_file_is_version_1_and_serves_until_the_bus_has_a_newer_one(
    bus: Bus, source: PolicyStore, ship: Ship
) -> None:
    ship("mine", THIRD)
    policy = await source.choose(JOB, None)
    assert (policy.version, digest_of(policy).hex()) == (1, PolicyFile.from_bytes(THIRD).digest)
    await PolicyStore(bus).put("mine", FIRST)
    assert (await source.choose(JOB, None)).version == 2
    assert (await source.choose(JOB, decided_by(policy))).version == 1
    assert (await source.choose(asking(1.0), None)).version == 1
    with pytest.raises(ValueError, match=r"no policy is called 'astrology': choose one of .*mine.*static"):
        await source.choose(examples.job(policy="astrology"), None)


async def test_a_version_that_the_bus_lost_is_refused_by_all_that_do_not_hold_it(bus: Bus, source: PolicyStore) -> None:
    await source.put("mine", FIRST)
    recorded = decided_by(await source.choose(JOB, None))
    await source.put("mine", SECOND)
    await bus.purge(POLICIES.name, subjects.of("policy", "mine"), keep=1)
    assert (await source.choose(JOB, recorded)).version == 1  # it is still in memory
    gone = "version 1 of policy 'mine' which decided this generation so far, is gone: there is 2"
    with pytest.raises(ValueError, match=gone):
        await PolicyStore(bus).choose(JOB, recorded)


async def test_a_policy_that_is_code_has_one_version_and_knows_its_options(source: PolicyStore) -> None:
    job = examples.job(policy="static")
    policy = await source.choose(job, None)
    assert policy is CODE["static"]
    assert await source.choose(job, decided_by(policy)) is policy
    with pytest.raises(ValueError, match="policy 'static' has version 1, not 2"):
        await source.choose(examples.job(policy="static", policy_options={"version": 2.0}), None)
    with pytest.raises(ValueError, match="policy 'random' decided this generation so far"):
        await source.choose(job, examples.action(policy="random"))
