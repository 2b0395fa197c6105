"""A real job of torchrun's agent under real services: kill -9 of any of them, and of a rank."""

import os
import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.control_plane import ControlPlane, control_plane
from tests.support.decision_checks import check_decisions
from tests.support.steady_job import CHECKPOINT_EVERY, NUM_SAMPLES
from tests.support.steady_training import JOB, TrainingJob, training

from dynamix.schemas import subjects
from dynamix.schemas.codec import decode
from dynamix.schemas.messages import Applied, Job
from dynamix.schemas.streams import FEED, JOBS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def used_per_epoch(job: TrainingJob) -> dict[int, list[int]]:
    """Samples used in each epoch by both ranks; of a step that was done again after a restart, the last time counts."""
    last: dict[tuple[int, int], dict[str, Any]] = {}
    for rank in (0, 1):
        for line in job.steps(rank):
            last[rank, line["step"]] = line
    used: dict[int, list[int]] = defaultdict(list)
    for line in last.values():
        used[line["epoch"]] += line["indices"]
    return used


async def specification_of(plane: ControlPlane) -> Job:
    """The specification of the job's newest generation."""
    message = await plane.bus.last(JOBS.name, subjects.of("job", JOB))
    assert message is not None
    return decode(Job, message.subject, message.payload)


async def test_training_continues_while_services_and_broker_are_killed(tmp_path: Path) -> None:
    async with control_plane("collector", "reward", "arbitrator") as plane, training(plane, tmp_path, 1000) as job:
        await job.wait_for_steps(25)
        specification = await specification_of(plane)
        await plane.wait_for(FEED.name, subjects.of("applied", JOB), 1)
        for name in ("collector", "reward", "arbitrator"):
            plane.services[name].kill()
            await job.more_steps(15)
            await plane.start(name)
        await plane.server.kill()
        await job.more_steps(30)
        await plane.server.start()
        applied = len(await plane.messages(FEED.name, subjects.of("applied", JOB)))
        await plane.wait_for(FEED.name, subjects.of("applied", JOB), applied + 2)
        job.stop_after_epoch()
        assert await job.ended() == 0
        assert {line["generation"] for line in job.steps()} == {0}
        for samples in used_per_epoch(job).values():
            assert sorted(samples) == list(range(NUM_SAMPLES))
        actions = await check_decisions(plane.bus, specification)
        sizes = {action.window: action.local_batch_sizes for action in actions}
        adopted = await plane.messages(FEED.name, subjects.of("applied", JOB))
        for message in adopted:
            assert isinstance(message, Applied)
            assert message.local_batch_sizes == sizes[message.decided_window]
            assert message.effective_step % 10 == 0
        assert len({line["sizes"][0] for line in job.steps()}) > 3


async def test_a_killed_rank_restarts_the_job_at_its_sample_with_its_last_sizes(tmp_path: Path) -> None:
    async with control_plane("collector", "arbitrator") as plane, training(plane, tmp_path, 2) as job:
        await job.wait_for_steps(65)
        first_specification = await specification_of(plane)
        os.kill(job.steps(rank=1)[-1]["pid"], signal.SIGKILL)
        assert await job.ended() == 0
        second_specification = msgspec.structs.replace(await specification_of(plane), phase="running")
        assert (first_specification.generation, second_specification.generation) == (0, 1)
        steps = job.steps()
        first = next(line for line in steps if line["generation"] == 1)
        before = {line["step"]: line for line in steps if line["generation"] == 0}
        assert first["step"] % CHECKPOINT_EVERY == 0
        assert first["step"] >= 60
        # where the restarted job repeats a step of the first generation, it uses the very samples and sizes of it
        for line in (line for line in steps if line["generation"] == 1 and line["step"] in before):
            assert line["indices"] == before[line["step"]]["indices"]
            assert line["sizes"] == before[line["step"]]["sizes"]
        assert first["sizes"] != [16, 16]
        used = used_per_epoch(job)
        assert set(used) == {0, 1}
        for samples in used.values():
            assert sorted(samples) == list(range(NUM_SAMPLES))
        actions = await check_decisions(plane.bus, first_specification, second_specification)
        assert {action.generation for action in actions} == {0, 1}
        assert [action.window for action in actions if action.generation == 1][:3] == [0, 1, 2]
