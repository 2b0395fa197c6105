"""An error of one job's policy halts the decisions for that generation only."""

import msgspec
import pytest
from tests.support import examples, learned
from tests.support.arbitrators import stored_actions
from tests.support.brokers import until
from tests.support.services_here import arbitrator_here

from dynamix.arbitrator.learned.policy_store import PolicyStore
from dynamix.arbitrator.policies.baselines import Static
from dynamix.arbitrator.policies.policy import Decision, Policy
from dynamix.runtime.bus import Bus
from dynamix.schemas.messages import Action, Job

NODES: dict[str, tuple[int, ...]] = {"node-a": (0, 1), "node-b": (2, 3)}
ODD, OTHER = examples.job(NODES, job="odd-0", policy="odd"), examples.job(NODES, job="other-0", policy="static")


async def report(bus: Bus, job: Job) -> None:
    """One window of all nodes."""
    for node, ranks in NODES.items():
        await bus.publish(msgspec.structs.replace(examples.state(node, ranks), job=job.job))


class Broken(Static):
    """Raises in every window."""

    def decide(self, *arguments: object) -> Decision:
        raise TypeError(arguments)


@pytest.mark.parametrize("fault", ["a file of odd metadata", "no policy", "a policy that raises"])
@pytest.mark.parametrize("is_there_first", [True, False])
async def test_a_policy_that_cannot_decide_halts_its_own_generation_only(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, fault: str, is_there_first: bool
) -> None:
    choose = PolicyStore.choose

    async def broken(self: PolicyStore, job: Job, recorded: Action | None) -> Policy:
        if job.job == ODD.job and fault == "no policy":
            raise OverflowError("1e400")
        is_raising = job.job == ODD.job and fault == "a policy that raises"
        return Broken() if is_raising else await choose(self, job, recorded)

    monkeypatch.setattr(PolicyStore, "choose", broken)
    await PolicyStore(bus).put("odd", learned.with_metadata("\ud800"))
    await bus.publish(ODD)
    await bus.publish(OTHER)
    if is_there_first:
        await report(bus, ODD)
    async with arbitrator_here(bus) as context:
        if not is_there_first:
            await report(bus, ODD)
        await report(bus, OTHER)
        assert [action.job for action in await stored_actions(bus, "*", 1)] == [OTHER.job]
        await until(lambda: context.counters.get("halted") == 1)  # jobs are opened beside each other
