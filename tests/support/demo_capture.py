"""Makes tests/data/demo.dxc again: the demo's steered job, captured while it runs.

    python -m tests.support.demo_capture tests/data/demo.dxc [DATA]

Real processes, gradients and services; half a minute. Run it only when messages change their meaning: the fixture
is there to detect an old capture that no longer replays equal.
"""

import asyncio
import sys
import tempfile
from pathlib import Path

from tests.support.capture_files import capture_job

from dynamix.cli.commands.demo.plan import DemoPlan, Variant
from dynamix.cli.commands.demo.runner import _Demo, services
from dynamix.recording.capture import CaptureEnd
from dynamix.recording.job_view import JobView
from dynamix.runtime.bus import Bus
from dynamix.schemas import subjects
from dynamix.schemas.streams import JOBS

STEERED = Variant(policy="proportional", arguments={"policy": "proportional"}, what="divided by decisions")


async def captured(path: Path, plan: DemoPlan) -> CaptureEnd:
    """Run the plan once, steered, and write all of it."""
    with tempfile.TemporaryDirectory(prefix="dynamix-capture-") as directory:
        async with services(Path(directory), sys.stderr.write) as (bus, environ):
            demo = _Demo(plan, bus, environ, Path(directory), _show)
            training = asyncio.create_task(demo.run(STEERED))
            end = await capture_job(bus, await _announced(bus), path, past=False)
            await training
    return end


def _show(_policy: str, view: JobView, _accuracy: float | None) -> None:
    sys.stderr.write(f"window {view.window}\n")


async def _announced(bus: Bus) -> str:
    """The id of the first job that begins."""
    async with bus.consume(JOBS.name, [subjects.of("job", subjects.ANY)], start="all") as consumer:
        async for batch in consumer:
            return subjects.parse(batch[0].subject).tokens[0]
    raise AssertionError("a consumer ends only when it is told to")


if __name__ == "__main__":
    sys.stderr.write(f"{asyncio.run(captured(Path(sys.argv[1]), DemoPlan(data=next(iter(sys.argv[2:]), None))))}\n")
