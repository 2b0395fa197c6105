"""One flipped bit in the broker's file of actions: the job is refused, or the bit has no effect."""

import asyncio
import contextlib
import random
from pathlib import Path

import pytest
from tests.support.arbitrators import Crew, crew, feed_states, two_node_job
from tests.support.bus_watch import BusWatch, stored_messages, watching
from tests.support.control_plane import ControlPlane, control_plane
from tests.support.decision_checks import recorded_states
from tests.support.examples import applied
from tests.support.faults import Figure, Scale
from tests.support.reference_fold import reference_decisions
from tests.support.stored_blocks import block_of

from dynamix.arbitrator.policies.registry import policy_named
from dynamix.schemas import subjects
from dynamix.schemas.codec import MalformedMessageError, decode
from dynamix.schemas.messages import Action, Job
from dynamix.schemas.streams import ACTIONS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

BEFORE, AFTER = 12, 6
"""Windows decided before the bit is flipped, and fed afterwards."""


async def test_a_flipped_bit_in_the_action_log_is_detected(scale: Scale, chance: random.Random, figure: Figure) -> None:
    """Any bit of the file, by chance; the broker crashes and starts on it, with a new arbitrator and maybe the old."""
    num_flips = scale(2, 10)
    refused = [await _flip_once(chance) for _ in range(num_flips)]
    figure("flips", num_flips)
    figure("refused", sum(refused))


async def _flip_once(chance: random.Random) -> bool:
    """Whether the job was refused."""
    job = two_node_job()
    async with control_plane() as plane, crew(plane) as arbitrators:
        await plane.bus.publish(job)
        async with watching(plane.bus, job.job) as watch:
            first = arbitrators.start()
            await watch.until_ready(first)
            await feed_states(plane, range(BEFORE))
            await watch.until_decided(BEFORE)
            newest = watch.actions[-1].action
            receipt = applied(newest.window, newest.window + 2, action_hash=newest.hash)
            await plane.bus.publish(receipt)
        stored = await stored_messages(plane.bus, ACTIONS.name, subjects.of("action", job.job))
        original = {one.sequence: one.payload for one in stored}
        if chance.random() < 0.5:
            arbitrators.kill(first)
        await plane.server.kill()
        _flip(plane.server._directory / "store", chance)
        await plane.server.start()
        return await _go_on(plane, arbitrators, job, original)


def _flip(store: Path, chance: random.Random) -> None:
    block = block_of(store, ACTIONS.name)
    data = bytearray(block.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    block.write_bytes(data)


async def _go_on(plane: ControlPlane, arbitrators: Crew, job: Job, original: dict[int, bytes]) -> bool:
    async with watching(plane.bus, job.job) as watch:
        arbitrators.start()
        await feed_states(plane, range(BEFORE, BEFORE + AFTER))
        await _end_of_it(plane, arbitrators, watch, job)
        refused = _refused(watch, arbitrators)
    states = await recorded_states(plane.bus, job)
    expected = {one.window: one for one in reference_decisions(job, policy_named(job.policy), states)}
    for message in await stored_messages(plane.bus, ACTIONS.name, subjects.of("action", job.job)):
        if message.sequence in original:
            assert message.payload == original[message.sequence] or refused
            continue
        action = decode(Action, message.subject, message.payload)
        assert action.window >= BEFORE, "a window was decided again"
        assert action.local_batch_sizes == expected[action.window].local_batch_sizes
    assert arbitrators.all_alive()
    return refused


def _refused(watch: BusWatch, arbitrators: Crew) -> bool:
    """Whether every arbitrator reported that it refuses this log."""
    return all(watch.counter(name, "refused_logs") > 0 for name in arbitrators.members)


async def _end_of_it(plane: ControlPlane, arbitrators: Crew, watch: BusWatch, job: Job) -> None:
    """Wait until all windows are decided, or every arbitrator has refused to."""
    async with asyncio.timeout(30):
        while not _refused(watch, arbitrators):
            newest = await plane.bus.last(ACTIONS.name, subjects.of("action", job.job))
            with contextlib.suppress(MalformedMessageError):
                if newest and decode(Action, newest.subject, newest.payload).window == BEFORE + AFTER - 1:
                    return
            await asyncio.sleep(0.1)  # what no event tells: the stream may have lost its end
