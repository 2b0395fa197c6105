"""Learned policies on a real control plane: the version of a generation outlives its arbitrator."""

from tests.support import learned
from tests.support.control_plane import ControlPlane, control_plane, one_node_job, report_of

from dynamix.arbitrator.learned.policy_store import PolicyStore
from dynamix.schemas.messages import Action, Job

SIZES = (128, 128, 128, 128)
SPEEDS = (1000.0, 1000.0, 1000.0, 500.0)
STAYS, SHRINKS, GROWS = (learned.policy_file("deltas", favour=choice).to_bytes() for choice in (0, 1, 2))
"""Each does the same to every rank, whatever it sees: 0, -25 and +25 samples."""


async def next_action(plane: ControlPlane, job: Job, window: int, num_actions: int) -> Action:
    """What is decided once a window is reported."""
    await plane.bus.publish(report_of(job, window, SIZES, SPEEDS))
    return (await plane.wait_for_actions(num_actions))[-1]


async def test_a_restarted_arbitrator_keeps_the_version_and_the_next_generation_takes_the_newest() -> None:
    async with control_plane("collector") as plane:
        store = PolicyStore(plane.bus)
        first = await store.put("mine", SHRINKS)
        await plane.start("arbitrator")
        job = one_node_job(policy="mine")
        await plane.bus.publish(job)
        action = await next_action(plane, job, 0, 1)
        assert (action.policy, action.policy_version, action.policy_digest) == ("mine", 1, first.digest)
        assert action.deltas == (-25,) * 4

        second = await store.put("mine", GROWS)
        assert (await next_action(plane, job, 1, 2)).policy_version == 1
        plane.services["arbitrator"].kill()
        await plane.start("arbitrator")
        action = await next_action(plane, job, 2, 3)
        assert (action.policy_version, action.policy_digest, action.deltas) == (1, first.digest, (-25,) * 4)

        restarted = one_node_job(policy="mine", generation=1)
        await plane.bus.publish(restarted)
        action = await next_action(plane, restarted, 0, 4)
        assert (action.policy_version, action.policy_digest, action.deltas) == (2, second.digest, (25,) * 4)
