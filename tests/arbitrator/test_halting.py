"""An error of one job's policy halts the decisions for that generation only."""

import asyncio

import msgspec
import pytest
from tests.support import examples, trained_policies
from tests.support.services_here import arbitrator_here

from dynamix.arbitrator.learned.policy_store import PolicySource, PolicyStore
from dynamix.arbitrator.policies.baselines import Static
from dynamix.arbitrator.policies.policy import Decision, Policy
from dynamix.arbitrator.service import ArbitratorSettings
from dynamix.runtime.bus import Bus
from dynamix.runtime.service import Context
from dynamix.schemas import subjects
from dynamix.schemas.codec import decode
from dynamix.schemas.messages import Action, Job
from dynamix.schemas.streams import ACTIONS

NODES: dict[str, tuple[int, ...]] = {"node-a": (0, 1), "node-b": (2, 3)}
ODD, OTHER = examples.job(NODES, job="odd-0", policy="odd"), examples.job(NODES, job="other-0", policy="static")


async def report(bus: Bus, job: Job) -> None:
    """One window of all nodes."""
    for node, ranks in NODES.items():
        await bus.publish(msgspec.structs.replace(examples.state(node, ranks), job=job.job))


async def decided(bus: Bus) -> list[str]:
    """The job of the first action."""
    async with asyncio.timeout(60), bus.consume(ACTIONS.name, [subjects.of("action", "*")], start="all") as consumer:
        return [decode(Action, message.subject, message.payload).job for message in await anext(consumer)]


async def halted(context: Context[ArbitratorSettings]) -> None:
    """Wait until one generation was halted: jobs are opened beside each other, so that it may come second."""
    async with asyncio.timeout(60):
        while not context.counters.get("halted"):  # noqa: ASYNC110 - a counter has no event
            await asyncio.sleep(0.01)
    assert context.counters["halted"] == 1


@pytest.mark.parametrize("is_there_first", [True, False])
@pytest.mark.parametrize("metadata", [5, None, "\ud800"])
async def test_a_file_with_odd_metadata_halts_its_own_generation_only(
    bus: Bus, metadata: object, is_there_first: bool
) -> None:
    await PolicyStore(bus).put("odd", trained_policies.with_metadata(metadata))
    await bus.publish(ODD)
    await bus.publish(OTHER)
    if is_there_first:
        await report(bus, ODD)
    async with arbitrator_here(bus) as context:
        if not is_there_first:
            await report(bus, ODD)
        await report(bus, OTHER)
        assert await decided(bus) == [OTHER.job]
        await halted(context)


class Broken(Static):
    """Raises in every window."""

    def decide(self, *arguments: object) -> Decision:
        raise TypeError(arguments)


@pytest.mark.parametrize("error", [TypeError("no text"), KeyError("actor"), OverflowError("1e400"), RecursionError()])
async def test_an_unexpected_error_halts_its_own_generation_only(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    choose = PolicySource.choose

    async def fail(self: PolicySource, job: Job, recorded: Action | None) -> Policy:
        if job.job == ODD.job:
            raise error
        return await choose(self, job, recorded)

    monkeypatch.setattr(PolicySource, "choose", fail)
    await bus.publish(ODD)
    async with arbitrator_here(bus) as context:
        await bus.publish(OTHER)
        await report(bus, ODD)
        await report(bus, OTHER)
        assert await decided(bus) == [OTHER.job]
        await halted(context)


async def test_a_policy_that_raises_halts_its_own_generation_only(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(self: PolicySource, job: Job, recorded: Action | None) -> Policy:  # noqa: ARG001 - as it is called
        return Broken() if job.job == ODD.job else Static()

    monkeypatch.setattr(PolicySource, "choose", broken)
    await bus.publish(ODD)
    async with arbitrator_here(bus) as context:
        await bus.publish(OTHER)
        await report(bus, ODD)
        await report(bus, OTHER)
        assert await decided(bus) == [OTHER.job]
        await halted(context)
