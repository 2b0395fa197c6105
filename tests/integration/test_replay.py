"""What real services stored over crashes and a restart of the job replays byte for byte."""

from pathlib import Path

import msgspec
import pytest
from tests.support.capture_files import capture_job
from tests.support.control_plane import ControlPlane, control_plane, feed_windows, one_node_job

from dynamix.recording.replay import ReplayTarget, replay
from dynamix.schemas import subjects
from dynamix.schemas.messages import Job
from dynamix.schemas.streams import FEED

NUM_WINDOWS = 12
"""In each of two generations."""


async def through_crashes(plane: ControlPlane, job: Job) -> None:
    """Windows of one generation, the arbitrator and the collector killed on the way."""
    third = NUM_WINDOWS // 3
    await feed_windows(plane, job, range(third))
    plane.services["arbitrator"].kill()
    await feed_windows(plane, job, range(third, 2 * third))
    plane.services["collector"].kill()
    await plane.start("arbitrator", "collector")
    await feed_windows(plane, job, range(2 * third, NUM_WINDOWS))


@pytest.mark.slow
async def test_a_job_with_crashes_and_a_restart_replays_byte_for_byte(tmp_path: Path) -> None:
    async with control_plane("collector", "reward", "arbitrator") as plane:
        job = one_node_job(policy="rule")
        await plane.bus.publish(job)
        await through_crashes(plane, job)
        await plane.wait_for_actions(NUM_WINDOWS)
        again = msgspec.structs.replace(job, generation=1)
        await plane.bus.publish(again)
        await through_crashes(plane, again)
        await plane.wait_for_actions(2 * NUM_WINDOWS)
        await plane.wait_for(FEED.name, subjects.of("reward", job.job, subjects.ANY), 2 * NUM_WINDOWS)
        path = tmp_path / "job.dxc"
        await capture_job(plane.bus, job.job, path, past=True)
    compared: dict[ReplayTarget, tuple[int, int, int]] = {}
    for into in ("collector", "reward", "arbitrator"):
        outcome = replay(path, into)
        assert outcome.bytes_equal, outcome.counts.differences
        compared[into] = (outcome.counts.num_compared, outcome.counts.num_equal, outcome.counts.num_uncompared)
    assert compared == {
        "collector": (4 * NUM_WINDOWS, 4 * NUM_WINDOWS, 0),
        "reward": (2 * NUM_WINDOWS, 2 * NUM_WINDOWS, 0),
        "arbitrator": (NUM_WINDOWS, NUM_WINDOWS, NUM_WINDOWS),  # of the first generation JOBS has no specification
    }
