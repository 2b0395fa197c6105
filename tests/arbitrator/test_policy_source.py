"""Which policy decides a generation: the newest at its start, and exactly that one for as long as it lasts."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support import examples, learned
from tests.support.brokers import operate

from dynamix.arbitrator.learned import policy_file
from dynamix.arbitrator.learned.policy_file import PolicyFile
from dynamix.arbitrator.learned.policy_source import PolicySource
from dynamix.arbitrator.learned.policy_store import PolicyStore
from dynamix.arbitrator.policies.policy import Policy, digest_of
from dynamix.arbitrator.policies.registry import POLICIES
from dynamix.runtime.bus import Bus
from dynamix.schemas import streams, subjects
from dynamix.schemas.messages import Action

Ship = Callable[[str, bytes], None]
JOB = examples.job(policy="mine")
FIRST, SECOND, THIRD = (learned.policy_file(seeds=(seed,)).to_bytes() for seed in (1, 2, 3))


@pytest.fixture
def source(bus: Bus) -> PolicySource:
    return PolicySource(PolicyStore(bus))


@pytest.fixture
def ship(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ship:
    """Has a policy come with the package."""
    monkeypatch.setattr(policy_file, "shipped_directory", lambda: tmp_path)

    def write(name: str, data: bytes) -> None:
        (tmp_path / f"{name}.safetensors").write_bytes(data)

    return write


def decided_by(policy: Policy, **changes: object) -> Action:
    """An action of this generation, decided by a policy."""
    identity = {"policy": policy.name, "policy_version": policy.version, "policy_digest": digest_of(policy)}
    return examples.action(**(identity | changes))


async def test_a_generation_begins_with_the_newest_version_and_keeps_it(bus: Bus, source: PolicySource) -> None:
    store = PolicyStore(bus)
    await store.put("mine", FIRST)
    second = await store.put("mine", SECOND)
    policy = await source.choose(JOB, None)
    assert (policy.name, policy.version, digest_of(policy)) == ("mine", 2, second.digest)
    await store.put("mine", THIRD)
    for reader in (source, PolicySource(PolicyStore(bus))):  # the same process, and one that was restarted
        again = await reader.choose(JOB, decided_by(policy))
        assert (again.version, digest_of(again)) == (2, second.digest)
    assert (await source.choose(JOB, None)).version == 3


async def test_a_job_may_ask_for_a_version(bus: Bus, source: PolicySource) -> None:
    for data in (FIRST, SECOND):
        await PolicyStore(bus).put("mine", data)
    assert (await source.choose(examples.job(policy="mine", policy_options={"version": 1.0}), None)).version == 1
    with pytest.raises(ValueError, match=r"version 7 of policy 'mine' does not exist: there is 2, 1"):
        await source.choose(examples.job(policy="mine", policy_options={"version": 7.0}), None)
    for version in (1.5, 0.0, 1e300, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=r"option version=.* of policy 'mine' must be a whole number from 1"):
            await source.choose(examples.job(policy="mine", policy_options={"version": version}), None)


async def test_a_job_with_an_option_that_its_policy_has_not_is_refused(source: PolicySource) -> None:
    known = {"dead_band": 0.05, "track": 1.0, "version": 1.0}
    assert (await source.choose(examples.job(policy_options=known), None)).name == "proportional"
    with pytest.raises(ValueError, match="'proportional' has no option 'deadband': did you mean dead_band"):
        await source.choose(examples.job(policy_options={"deadband": 0.05}), None)
    with pytest.raises(ValueError, match=r"smoothing=2 of policy 'proportional' must be from 0\.01 to 1"):
        await source.choose(examples.job(policy_options={"smoothing": 2.0}), None)


async def test_the_shipped_file_is_version_1_and_serves_until_the_bus_has_a_newer_one(
    bus: Bus, source: PolicySource, ship: Ship
) -> None:
    ship("mine", THIRD)
    policy = await source.choose(JOB, None)
    assert (policy.version, digest_of(policy).hex()) == (1, PolicyFile.from_bytes(THIRD).digest)
    await PolicyStore(bus).put("mine", FIRST)
    assert (await source.choose(JOB, None)).version == 2
    assert (await source.choose(JOB, decided_by(policy))).version == 1
    assert (await source.choose(examples.job(policy="mine", policy_options={"version": 1.0}), None)).version == 1


async def test_a_version_that_is_gone_is_refused(bus: Bus, source: PolicySource) -> None:
    store = PolicyStore(bus)
    await store.put("mine", FIRST)
    recorded = decided_by(await source.choose(JOB, None))
    await store.put("mine", SECOND)
    await bus.purge(streams.POLICIES.name, subjects.of("policy", "mine"), keep=1)
    with pytest.raises(
        ValueError, match="version 1 of policy 'mine' which decided this generation so far, is gone: there is 2"
    ):
        await PolicySource(PolicyStore(bus)).choose(JOB, recorded)
    assert (await source.choose(JOB, recorded)).version == 1  # it is still in memory


async def test_the_cache_holds_what_the_bus_lost(bus: Bus, tmp_path: Path) -> None:
    await PolicyStore(bus).put("mine", FIRST)
    recorded = decided_by(await PolicySource(PolicyStore(bus, tmp_path)).choose(JOB, None))
    await bus.purge(streams.POLICIES.name, subjects.of("policy", "mine"))
    await PolicyStore(bus).put("mine", SECOND)
    again = await PolicySource(PolicyStore(bus, tmp_path)).choose(JOB, recorded)
    await operate(bus, f"STREAM.PURGE.{streams.POLICIES.name}")
    once_more = await PolicySource(PolicyStore(bus, tmp_path)).choose(JOB, recorded)
    assert digest_of(again) == digest_of(once_more) == recorded.policy_digest


async def test_a_policy_that_is_code_has_version_1_and_no_file(source: PolicySource) -> None:
    job = examples.job(policy="static")
    policy = await source.choose(job, None)
    assert policy is POLICIES["static"]
    assert await source.choose(job, decided_by(policy)) is policy
    with pytest.raises(ValueError, match="policy 'static' has version 1, not 2"):
        await source.choose(examples.job(policy="static", policy_options={"version": 2.0}), None)


async def test_a_generation_that_another_policy_decided_is_refused(source: PolicySource) -> None:
    with pytest.raises(
        ValueError, match="policy 'random' decided this generation so far, its specification says 'static'"
    ):
        await source.choose(examples.job(policy="static"), examples.action(policy="random"))


async def test_an_unknown_policy_is_answered_with_those_there_are(bus: Bus, source: PolicySource, ship: Ship) -> None:
    ship("with-us", THIRD)
    await PolicyStore(bus).put("mine", FIRST)
    with pytest.raises(ValueError, match=r"no policy is called 'astrology': choose one of .*mine.*static.*with-us"):
        await source.choose(examples.job(policy="astrology"), None)
