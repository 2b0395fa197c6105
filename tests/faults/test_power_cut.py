"""A power cut takes what the broker acknowledged since its last fsync: its files are then a moment older, each its own.

Made by copies of the streams' folders: what is acknowledged after the copy is lost.
"""

import itertools
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.support.arbitrators import crew, feed_states, two_node_job
from tests.support.bus_watch import watching
from tests.support.control_plane import control_plane

from dynamix.schemas.streams import ACTIONS, FEED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

BEFORE, LOST, AFTER = 8, 2, 6


@pytest.mark.parametrize("lost", [(ACTIONS.name, FEED.name), (ACTIONS.name,)], ids="-".join)
async def test_after_a_power_cut_a_restarted_arbitrator_decides_each_window_once(lost: Sequence[str]) -> None:
    job = two_node_job()
    async with control_plane() as plane, crew(plane) as arbitrators:
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
