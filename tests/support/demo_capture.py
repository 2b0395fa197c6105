"""Makes tests/data/demo.dxc again: the demo's steered job, captured while it runs.

    python -m tests.support.demo_capture tests/data/demo.dxc [DATA]

Real processes, gradients and services; half a minute. Run it only when messages change their meaning: the fixture
is there to detect an old capture that no longer replays equal.
"""

import asyncio
import sys
from pathlib import Path

from tests.support.capture_files import capture_job

from dynamix.cli.commands.demo import DemoPlan, Variant, run_job, services
from dynamix.cli.terminal import ProgressLine
from dynamix.recording.capture import CaptureEnd
from dynamix.schemas import subjects
from dynamix.schemas.streams import JOBS

STEERED = Variant("proportional", {"policy": "proportional"}, "divided by decisions")


async def captured(path: Path, plan: DemoPlan) -> CaptureEnd:
    """Run the plan once, steered, and write all of it."""
    job = f"demo-{STEERED.policy}-{subjects.new_run_id()}"
    with ProgressLine() as progress:
        async with services(progress.write_line) as running:
            training = asyncio.create_task(run_job(plan, STEERED, job, running, progress))
            async with running.bus.consume(JOBS.name, [subjects.of("job", job)], start="all") as consumer:
                await anext(aiter(consumer))
            end = await capture_job(running.bus, job, path, past=False)
            await training
    return end


if __name__ == "__main__":
    sys.stderr.write(f"{asyncio.run(captured(Path(sys.argv[1]), DemoPlan(data=next(iter(sys.argv[2:]), None))))}\n")
