"""Every alert about a job is raised by the fault that it is for, and by no other of these, and clears again.

The services are real and here; a fault is scraped while it lasts, and promtool goes on with it for twenty minutes.
"""

import asyncio
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.support import examples
from tests.support.alert_trials import Phase, check_alerts, needs
from tests.support.brokers import ConfiguredServer
from tests.support.control_plane import one_node_job, report_of
from tests.support.scraped_plane import EQUAL, ScrapedPlane
from tests.support.services_here import services_here
from torch import distributed as dist

import dynamix.arbitrator.service as arbitrator
from dynamix.arbitrator.families.ends import class_of_end
from dynamix.arbitrator.shown import ShownDecisions
from dynamix.runtime.bus import Bus
from dynamix.trainer.steering.run import reason_after

pytestmark = needs("promtool")


async def test_a_job_that_trains_as_it_should_raises_nothing(plane: ScrapedPlane, tmp_path: Path) -> None:
    job = one_node_job()
    await plane.bus.publish(job)
    check_alerts(tmp_path, Phase(30, await plane.record(plane.train(job, 3)), set()))


async def test_sizes_that_stick_to_a_bound(plane: ScrapedPlane, tmp_path: Path) -> None:
    """Three slow ranks get the least from the first decision on; later all are as fast."""
    job = one_node_job(initial_local_batch_sizes=(32, 32, 32, 160), base_global_batch_size=256)
    await plane.bus.publish(job)
    before = await plane.record(plane.train(job, 2, (100.0, 100.0, 100.0, 500.0)))
    stuck = await plane.record(plane.train(job, 22, (100.0, 100.0, 100.0, 500.0)))
    after = await plane.record(plane.train(job, 12))
    check_alerts(
        tmp_path, Phase(20, before, set()), Phase(20, stuck, {"DynamixBatchSizeStuck"}), Phase(20, after, set())
    )


async def test_a_job_whose_policy_does_not_exist(plane: ScrapedPlane, tmp_path: Path) -> None:
    job = one_node_job(policy="no-such")
    before = await plane.record()
    await plane.bus.publish(job)
    halted = await plane.record(plane.train(job, 3))
    await plane.bus.publish(msgspec.structs.replace(job, phase="ended", end_reason="completed"))
    await plane.no_longer("arbitrator", job.job)
    check_alerts(
        tmp_path,
        Phase(20, before, set()),
        Phase(20, halted, {"DynamixJobHalted"}),
        Phase(20, await plane.record(), set()),
    )


async def test_decisions_that_stay_away(plane: ScrapedPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker takes no action: windows go on."""
    job, go_on = one_node_job(), asyncio.Event()
    await plane.bus.publish(job)
    before = await plane.record(plane.train(job, 2))
    store = plane.bus.publish_action

    async def wait(*arguments: Any, **options: Any) -> int:
        await go_on.wait()
        return await store(*arguments, **options)

    monkeypatch.setattr(plane.bus, "publish_action", wait)

    async def report_on() -> None:
        for window in range(2, 12):
            await plane.bus.publish(report_of(job, window, (128,) * 4, EQUAL))
        await plane.shows("collector", "job_window", 11, training_job=job.job)

    without = await plane.record(report_on())
    go_on.set()
    await plane.shows("arbitrator", "job_decided_window", 11, training_job=job.job)
    check_alerts(
        tmp_path,
        Phase(20, before, set()),
        Phase(20, without, {"DynamixNoDecisions"}),
        Phase(20, await plane.record(), set()),
    )


async def test_a_job_that_hangs(
    server: ConfiguredServer, bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late_s = [0.0]
    clock = partial(ShownDecisions, clock=lambda: time.monotonic() + late_s[0])
    monkeypatch.setattr(arbitrator, "ShownDecisions", clock)
    async with services_here(bus, "collector", "reward", "arbitrator") as services:
        plane, job = ScrapedPlane(server, bus, services), one_node_job()
        await bus.publish(job)
        before = await plane.record(plane.train(job, 3))
        late_s[0] = 1500.0
        silent = await plane.record()
        await plane.train(job, 1)
        check_alerts(
            tmp_path,
            Phase(20, before, set()),
            Phase(20, silent, {"DynamixJobSilent"}),
            Phase(20, await plane.record(), set()),
        )


def timed_out_collective() -> BaseException:
    """What gloo raises in a rank whose peer does not come."""
    store, groups, found = dist.HashStore(), [], []

    def rank(number: int) -> None:
        groups.append(dist.ProcessGroupGloo(store, number, 2, timedelta(seconds=2)))
        if number == 0:
            try:
                groups[-1].allreduce([torch.ones(4)]).wait()
            except RuntimeError as error:
                found.append(error)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (error,) = found
    return error


async def test_a_job_whose_communication_times_out(plane: ScrapedPlane, tmp_path: Path) -> None:
    job = one_node_job()
    await plane.bus.publish(job)
    before = await plane.record(plane.train(job, 2))
    reason = reason_after(await asyncio.to_thread(timed_out_collective), may_restart=False)
    assert reason is not None
    assert class_of_end(reason) == "timeout", reason

    async def end() -> None:
        await plane.bus.publish(msgspec.structs.replace(job, phase="ended", end_reason=reason))
        await plane.shows("arbitrator", "jobs_ended_total", 1, reason="timeout")

    ended = await plane.record(end())
    check_alerts(
        tmp_path,
        Phase(20, before, set()),
        Phase(5, ended, {"DynamixCommunicationTimeout"}),
        Phase(25, await plane.record(), set()),
    )


async def test_a_job_that_is_started_again(plane: ScrapedPlane, tmp_path: Path) -> None:
    """As torchrun does after a time-out of its communication, too: the job does not end by it."""
    job = one_node_job()
    await plane.bus.publish(job)
    before = await plane.record(plane.train(job, 2))
    again = msgspec.structs.replace(job, generation=1)
    await plane.bus.publish(again)
    plane.window = 0
    started = await plane.record(plane.train(again, 2))
    await plane.shows("collector", "job_generation", 1, training_job=job.job)
    check_alerts(
        tmp_path,
        Phase(20, before, set()),
        Phase(5, started, {"DynamixJobRestarted"}),
        Phase(25, await plane.record(), set()),
    )


@pytest.mark.parametrize(
    ("reason", "end"),
    [
        ("completed", "completed"),
        ("left", "left"),
        ("KeyboardInterrupt", "stopped"),
        ("SignalException: Process 7 got signal: 15", "stopped"),
        ("DistBackendError: NCCL communicator was aborted: Watchdog caught collective operation timeout", "timeout"),
        ("RuntimeError: wait timeout after 5000ms, keys: /default_pg/0//cpu//0/0", "timeout"),
        ("RuntimeError: CUDA out of memory", "error"),
        ("ValueError: timeouts must be positive", "error"),
    ],
)
def test_the_reasons_of_ends_are_few(reason: str, end: str) -> None:
    assert class_of_end(reason) == end


async def test_reports_that_were_dropped_without_a_broker(plane: ScrapedPlane, tmp_path: Path) -> None:
    job = one_node_job()
    await plane.bus.publish(job)
    before = await plane.record(plane.train(job, 2))
    dropped = await plane.record(plane.train(job, 1, num_reports_dropped=3))
    later = await plane.record(plane.train(job, 2, num_reports_dropped=3))
    check_alerts(
        tmp_path, Phase(20, before, set()), Phase(5, dropped, {"DynamixReportsDropped"}), Phase(20, later, set())
    )


async def test_runs_of_one_name_that_take_different_times(plane: ScrapedPlane, tmp_path: Path) -> None:
    """The third takes ten times as long to 80 %; then come eight that take as long as each other."""

    async def run(number: int, time_s: float) -> None:
        job = one_node_job(job=f"mnist-{number:08d}")
        await plane.bus.publish(job)
        plane.window = 0
        totals = examples.totals(0, time_s=time_s)
        await plane.train(job, 1, totals=totals, held_out_accuracy=0.8)
        await plane.shows("arbitrator", "job_decided_window", 0, training_job=job.job)
        await plane.bus.publish(msgspec.structs.replace(job, phase="ended", end_reason="completed"))
        await plane.no_longer("arbitrator", job.job)

    await run(0, 1.0)
    await run(1, 1.1)
    before = await plane.record()
    differ = await plane.record(run(2, 10.0))
    for number in range(3, 11):
        await run(number, 1.0 + 0.01 * number)
    check_alerts(
        tmp_path,
        Phase(20, before, set()),
        Phase(20, differ, {"DynamixRunsDiffer"}),
        Phase(20, await plane.record(), set()),
    )
