"""The wall clock jumps by an hour and back under running services: only the times in their logs change."""

import json
from datetime import datetime
from pathlib import Path

import pytest
from tests.support.bus_watch import watching
from tests.support.control_plane import ControlPlane, feed_windows, one_node_job
from tests.support.decision_checks import check_decisions
from tests.support.faults import Figure, Scale

from dynamix.cli.services import SERVICES
from dynamix.schemas import subjects
from dynamix.schemas.streams import FEED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STEPPED_CLOCK = Path(__file__).parents[1] / "support" / "stepped_clock"
HOUR_S = 3600


async def test_clock_steps_of_an_hour_change_no_decision(
    plane: ControlPlane, scale: Scale, tmp_path: Path, figure: Figure
) -> None:
    steps_s, job, per_step = (HOUR_S, -HOUR_S, 24 * HOUR_S, 0), one_node_job(), scale(10, 50)
    clock, logs = tmp_path / "offset", tmp_path / "logs"
    clock.write_text("0")
    plane.environ |= {"PYTHONPATH": str(STEPPED_CLOCK), "STEPPED_CLOCK": str(clock), "DYNAMIX_LOG_LEVEL": "debug"}
    await plane.bus.publish(job)
    with logs.open("wb") as output:
        await plane.start(*SERVICES, output=output)
        async with watching(plane.bus, job.job) as watch:
            for number, offset_s in enumerate(steps_s):
                clock.write_text(str(offset_s))
                await feed_windows(plane, job, range(number * per_step, (number + 1) * per_step))
                await watch.until_decided((number + 1) * per_step)
        num_windows = len(steps_s) * per_step
        rewards = await plane.wait_for(FEED.name, subjects.of("reward", job.job, "*"), num_windows)
        assert len(rewards) == num_windows
        assert all(service.exit_code() is None for service in plane.services.values())
    await check_decisions(plane.bus, job, num_windows=num_windows)
    assert _clock_range_s(logs) >= 24 * HOUR_S  # the services' clocks did step
    figure("steps", len(steps_s))


def _clock_range_s(logs: Path) -> float:
    """Between the earliest and the latest time in the logs."""
    lines = (json.loads(line) for line in logs.read_text().splitlines() if line.startswith("{"))
    times = [datetime.fromisoformat(line["timestamp"]).timestamp() for line in lines]
    return max(times) - min(times)
