"""Several arbitrators without a lease: kill -9, SIGSTOP, standby; compare-and-set decides between them."""

import asyncio
import functools
import itertools
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.support.arbitrators import Feeding, crew, feed_states, two_node_job
from tests.support.bus_watch import watching
from tests.support.control_plane import ControlPlane
from tests.support.decision_checks import check_decisions
from tests.support.faults import Figure, Scale

from dynamix.schemas.streams import ACTIONS, FEED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


async def test_each_window_is_decided_once_over_thirty_kills(
    plane: ControlPlane, scale: Scale, chance: random.Random, figure: Figure
) -> None:
    rounds, job, num_kills = scale(4, 30), two_node_job(), 0
    await plane.bus.publish(job)
    async with watching(plane.bus, job.job) as watch, crew(plane) as arbitrators:
        await watch.until_ready(arbitrators.start(), arbitrators.start())
        for begin in range(0, 10 * rounds, 10):
            feeding = asyncio.create_task(feed_states(plane, range(begin, begin + 10)))
            await watch.until_decided(begin + chance.randint(1, 9))
            for victim in chance.sample(sorted(arbitrators.members), chance.choice([1, 1, 2])):
                arbitrators.kill(victim)
                arbitrators.start()
                num_kills += 1
            await feeding
        await watch.until_decided(10 * rounds)
    actions = await check_decisions(plane.bus, job, num_windows=10 * rounds)
    figure("kills", num_kills)
    figure("decided_exactly_once", f"{len({action.window for action in actions})}/{10 * rounds}")
    waits_s = [later.at_s - earlier.at_s for earlier, later in itertools.pairwise(watch.actions)]
    figure("longest_without_decision_s", round(max(waits_s), 3))  # both may be dead, and a start takes a second


async def test_a_continued_arbitrator_writes_nothing_stale(
    plane: ControlPlane, scale: Scale, chance: random.Random, figure: Figure
) -> None:
    """SIGSTOP in mid-stream until the other has decided on; the broker refuses what it wakes up with."""
    num_stops, job = scale(2, 10), two_node_job()
    await plane.bus.publish(job)
    async with watching(plane.bus, job.job) as watch, crew(plane) as arbitrators:
        names = [arbitrators.start(), arbitrators.start()]
        await watch.until_ready(*names)
        feeding = Feeding(functools.partial(feed_states, plane))
        for _ in range(num_stops):
            zombie = chance.choice(names)
            await watch.until_decided(len(watch.actions) + chance.randint(5, 15))
            arbitrators.stop(zombie)
            await watch.until_decided(len(watch.actions) + chance.randint(20, 60))
            adopted = watch.counter(zombie, "adopted")
            arbitrators.go_on(zombie)
            await watch.until(lambda name=zombie, before=adopted: watch.counter(name, "adopted") > before)
        num_windows = await feeding.finish()
        await watch.until_decided(num_windows)
        assert arbitrators.all_alive()
        refused = sum(watch.counter(name, "adopted") for name in names)
    await check_decisions(plane.bus, job, num_windows=num_windows)
    figure("stops", num_stops)
    figure("writes_refused", refused)


# --- a power cut takes what was acknowledged since the last fsync: each stream's folder is then a moment older ---

BEFORE, LOST, AFTER = 8, 2, 6


@pytest.mark.parametrize("lost", [(ACTIONS.name, FEED.name), (ACTIONS.name,)], ids="-".join)
async def test_after_a_power_cut_a_restarted_arbitrator_decides_each_window_once(
    plane: ControlPlane, lost: Sequence[str]
) -> None:
    job = two_node_job()
    async with crew(plane) as arbitrators:
        store = Path(plane.server._directory) / "store"
        await plane.bus.publish(job)
        async with watching(plane.bus, job.job) as before:
            first = arbitrators.start()
            await before.until_ready(first)
            await feed_states(plane, range(BEFORE))
            await before.until_decided(BEFORE)
            await plane.server.kill()
            shutil.copytree(store, store.with_name("older"))
            await plane.server.start()
            await feed_states(plane, range(BEFORE, BEFORE + LOST))
            await before.until_decided(BEFORE + LOST)
        arbitrators.kill(first)
        await plane.server.kill()
        take_back(store, store.with_name("older"), lost)
        await plane.server.start()
        async with watching(plane.bus, job.job) as after:
            await after.until_ready(arbitrators.start())
            await feed_states(plane, range(BEFORE + LOST, BEFORE + LOST + AFTER))
            await after.until(lambda: after.actions[-1].action.window == BEFORE + LOST + AFTER - 1)
        actions = [seen.action for seen in after.actions]
        assert [action.window for action in actions] == list(range(BEFORE + LOST + AFTER))
        assert all(new.previous_hash == old.hash for old, new in itertools.pairwise(actions))
        known = [seen.action.hash for seen in before.actions[: BEFORE + LOST]]
        num_same = BEFORE if FEED.name in lost and ACTIONS.name in lost else BEFORE + LOST
        assert [action.hash for action in actions[:num_same]] == known[:num_same], "equal inputs, equal decisions"
        assert arbitrators.all_alive()


def take_back(store: Path, older: Path, streams: Sequence[str]) -> None:
    for stream in streams:
        (folder,) = store.glob(f"jetstream/*/streams/{stream}")
        shutil.rmtree(folder)
        shutil.copytree(older / folder.relative_to(store), folder)
