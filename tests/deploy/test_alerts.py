"""Every alert is raised by the fault that it is for, and by no other of these, and clears again.

The services are real and here; a fault is scraped while it lasts, and promtool goes on with it for twenty minutes.
"""

import asyncio
import re
import threading
import time
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import yaml
from tests.support import alert_trials, examples
from tests.support.alert_trials import Phase, Recorded, check_alerts, needs, record
from tests.support.brokers import ConfiguredServer, publish_unstored, until
from tests.support.control_plane import NODE, one_node_job, report_of
from tests.support.services_here import ServiceHere, services_here
from torch import distributed as dist

import dynamix.arbitrator.service as arbitrator
from dynamix.arbitrator.learning.service import LearnerSettings, _Learner
from dynamix.arbitrator.learning.updating import Outcome
from dynamix.arbitrator.shown import ShownDecisions, class_of_end
from dynamix.collector import shown as collector_shown
from dynamix.collector.ebpf.syscall import ProgramInfo
from dynamix.collector.shown import ShownWindows
from dynamix.runtime.bus import Bus
from dynamix.runtime.bus.provision import provision
from dynamix.runtime.health.watchdog import Watchdog
from dynamix.runtime.metrics import scrape as scraping
from dynamix.schemas import subjects
from dynamix.schemas.codec import decode
from dynamix.schemas.messages import Action, Job
from dynamix.schemas.streams import FEED
from dynamix.trainer.job.reporting import reason_after

ROOT = Path(__file__).parents[2]
EQUAL = (100.0, 100.0, 100.0, 100.0)

pytestmark = needs("promtool")

Services = dict[str, ServiceHere]


class Plane:
    """All services on one bus, and a made-up job that reports to them."""

    def __init__(self, server: ConfiguredServer, bus: Bus, services: Services) -> None:
        self.server = server
        self.bus = bus
        self.services = services
        self.window = 0

    async def train(self, job: Job, num_windows: int, speeds: tuple[float, ...] = EQUAL, **changes: Any) -> None:
        """Report windows of a job, each with the sizes last decided, and wait until all services have handled them."""
        for _ in range(num_windows):
            action = await self.bus.last("ACTIONS", subjects.of("action", job.job))
            known = None if action is None else decode(Action, action.subject, action.payload)
            sizes = job.initial_local_batch_sizes if known is None else known.local_batch_sizes
            report = report_of(job, self.window, sizes, speeds)
            await self.bus.publish(msgspec.structs.replace(report, **changes))
            self.window += 1
            await self.shows("arbitrator", "job_state_window", self.window - 1, training_job=job.job)

    async def shows(self, component: str, name: str, value: float, **labels: str) -> None:
        """Wait until a service shows a number."""
        inside = ",".join(f'{key}="{text}"' for key, text in {"component": component, **labels}.items())
        await self.scraped(component, lambda text: f"dynamix_{name}{{{inside}}} {float(value)}\n" in text)

    async def no_longer(self, component: str, job: str) -> None:
        """Wait until a service shows a job no longer."""
        await self.scraped(component, lambda text: job not in text)

    async def scraped(self, component: str, condition: Callable[[str], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition(self.services[component].scrape()):  # noqa: ASYNC110 - what a scraper would do
                await asyncio.sleep(0.05)

    async def record(self, happening: Any = None, **options: Any) -> dict[str, Recorded]:
        return await record({name: one.scrape for name, one in self.services.items()}, happening, **options)


@pytest.fixture
async def plane(server: ConfiguredServer, bus: Bus) -> AsyncIterator[Plane]:
    async with services_here(bus, "collector", "reward", "arbitrator") as services:
        yield Plane(server, bus, services)


async def test_a_job_that_trains_as_it_should_raises_nothing(plane: Plane, tmp_path: Path) -> None:
    job = one_node_job()
    await plane.bus.publish(job)
    check_alerts(tmp_path, Phase(30, await plane.record(plane.train(job, 3)), set()))


async def test_sizes_that_stick_to_a_bound(plane: Plane, tmp_path: Path) -> None:
    """Three slow ranks get the least from the first decision on; later all are as fast."""
    job = one_node_job(initial_local_batch_sizes=(32, 32, 32, 160), base_global_batch_size=256)
    await plane.bus.publish(job)
    before = await plane.record(plane.train(job, 2, (100.0, 100.0, 100.0, 500.0)))
    stuck = await plane.record(plane.train(job, 22, (100.0, 100.0, 100.0, 500.0)))
    after = await plane.record(plane.train(job, 12))
    check_alerts(
        tmp_path, Phase(20, before, set()), Phase(20, stuck, {"DynamixBatchSizeStuck"}), Phase(20, after, set())
    )


async def test_a_job_whose_policy_does_not_exist(plane: Plane, tmp_path: Path) -> None:
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


async def test_decisions_that_stay_away(plane: Plane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        plane, job = Plane(server, bus, services), one_node_job()
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


async def test_a_job_whose_communication_times_out(plane: Plane, tmp_path: Path) -> None:
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


async def test_a_broker_that_is_away(plane: Plane, tmp_path: Path) -> None:
    before = await plane.record()
    await plane.server.stop()
    await until(lambda: not plane.bus.is_connected)
    away = await plane.record()
    await plane.server.restart()
    await until(lambda: plane.bus.is_connected)
    check_alerts(
        tmp_path,
        Phase(20, before, set()),
        Phase(20, away, {"DynamixNotReady"}),
        Phase(20, await plane.record(), set()),
    )


async def test_a_service_that_is_down(plane: Plane, tmp_path: Path) -> None:
    before = await plane.record()
    down = before | {"reward": Recorded(None, None, 1.0)}
    check_alerts(
        tmp_path,
        Phase(20, before, set()),
        Phase(20, down, {"DynamixServiceDown"}),
        Phase(20, before, set()),
    )


async def test_a_stream_that_is_full(plane: Plane, tmp_path: Path) -> None:
    job = one_node_job()
    await plane.bus.publish(job)
    before = await plane.record(plane.train(job, 1))
    context = plane.services["reward"].context

    async def wait_for_room() -> None:
        await provision(plane.bus, [msgspec.structs.replace(FEED, max_bytes=100, discard="new")])
        waiting = asyncio.create_task(context.publish_when_room(examples.reward(NODE, (0, 1, 2, 3), window=50)))
        await until(lambda: context.counters.get("waits_for_room"))
        await provision(plane.bus, [FEED])
        assert await waiting

    full = await plane.record(wait_for_room())
    check_alerts(
        tmp_path,
        Phase(20, before, set()),
        Phase(20, full, {"DynamixStreamFull"}),
        Phase(20, await plane.record(), set()),
    )


async def test_messages_that_nothing_can_be_made_of(plane: Plane, tmp_path: Path) -> None:
    before = await plane.record()

    async def send_garbage() -> None:
        await publish_unstored(plane.bus, subjects.of("state", "job-1", NODE), b"no message")
        await until(lambda: plane.services["arbitrator"].context.counters.get("dead_letters"))

    check_alerts(
        tmp_path,
        Phase(20, before, set()),
        Phase(20, await plane.record(send_garbage()), {"DynamixDeadLetters"}),
        Phase(20, await plane.record(), set()),
    )


async def test_reports_that_were_dropped_without_a_broker(plane: Plane, tmp_path: Path) -> None:
    job = one_node_job()
    await plane.bus.publish(job)
    before = await plane.record(plane.train(job, 2))
    dropped = await plane.record(plane.train(job, 1, num_reports_dropped=3))
    later = await plane.record(plane.train(job, 2, num_reports_dropped=3))
    check_alerts(
        tmp_path, Phase(20, before, set()), Phase(5, dropped, {"DynamixReportsDropped"}), Phase(20, later, set())
    )


async def test_more_samples_than_are_shown(plane: Plane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = await plane.record()
    with monkeypatch.context() as patch:
        patch.setattr(scraping, "MAX_SAMPLES", 25)
        beyond = await plane.record()
    check_alerts(
        tmp_path,
        Phase(20, before, set()),
        Phase(20, beyond, {"DynamixSamplesLeftOut"}),
        Phase(20, await plane.record(), set()),
    )


async def test_runs_of_one_name_that_take_different_times(plane: Plane, tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("bad", "good", "firing"),
    [
        ([1.0, 1.1] * 8, [9.0, 9.1] * 12, {"DynamixRewardPlateau"}),
        ([1.0, 1.1] * 5 + [9.0, 9.1] * 5 + [5.0, 5.1] * 4, [9.2, 9.3] * 8, {"DynamixRewardCollapse"}),
    ],
)
async def test_returns_that_do_not_rise_or_fall(
    bus: Bus, tmp_path: Path, bad: list[float], good: list[float], firing: set[str]
) -> None:
    learner, one = learner_here(bus)
    before = await record({"learner": one.scrape})
    await learner._watch(Outcome(None, bad, float("nan"), 0.0, []))
    found = await record({"learner": one.scrape})
    await learner._watch(Outcome(None, good, float("nan"), 0.0, []))
    after = await record({"learner": one.scrape})
    check_alerts(tmp_path, Phase(20, before, set()), Phase(20, found, firing), Phase(20, after, set()))


async def test_a_value_function_that_explains_nothing(bus: Bus, tmp_path: Path) -> None:
    learner, one = learner_here(bus)
    phases = [Phase(20, await record({"learner": one.scrape}), set())]
    for explained, firing in ((0.01, {"DynamixValueUnexplained"}), (0.9, set())):
        for _ in range(10):
            await learner._watch(Outcome(None, [], explained, 0.0, []))
        phases.append(Phase(20, await record({"learner": one.scrape}), firing))
    check_alerts(tmp_path, *phases)


def learner_here(bus: Bus) -> tuple[_Learner, ServiceHere]:
    one = ServiceHere("learner", bus, LearnerSettings(policy="mine"), Watchdog(0.0))
    one.context.counters["ready"] = 1
    return _Learner(one.context, SimpleNamespace()), one  # type: ignore[arg-type]


async def test_a_probe_that_costs_more_than_a_hundredth_of_the_machine(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel counts what the probe takes: 3 % of all processors, then 0.3 %."""
    stats = tmp_path / "bpf_stats_enabled"
    stats.write_text("1\n")
    monkeypatch.setattr(collector_shown, "STATS_ENABLED", stats)
    monkeypatch.setattr(collector_shown.os, "cpu_count", lambda: 4)
    spent_ns = [0]
    probe = SimpleNamespace(cost=lambda: {"sockets": ProgramInfo("sockets", (), spent_ns[0], 1000)})
    one = ServiceHere("collector", bus, None, Watchdog(0.0))
    one.context.counters["ready"] = 1
    ShownWindows(one.context.metrics, probe)
    phases = []
    for share, firing in ((0.003, set()), (0.03, {"DynamixProbeCost"}), (0.003, set())):
        before = alert_trials.samples(one.scrape(), "collector")
        spent_ns[0] += int(10e9 * 4 * share)
        after = alert_trials.samples(one.scrape(), "collector")
        phases.append(Phase(20, {"collector": Recorded(before, after, 10.0)}, firing))
    assert 'dynamix_probe_cost_measured{component="collector"} 1.0' in one.scrape()
    check_alerts(tmp_path, *phases)


@pytest.mark.parametrize(
    ("metric", "firing"),
    [
        ("dynamix_process_cpu_seconds_total", "DynamixCollectorCost"),
        ("dynamix_loop_lag_seconds_total", "DynamixEventLoopBlocked"),
    ],
)
async def test_a_collector_that_computes_all_the_time(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metric: str, firing: str
) -> None:
    """Its event loop is late, and takes more than a hundredth of the machine."""
    others = tuple(name for name in alert_trials.LOADED if name != metric)
    async with Watchdog(0.0, tick_s=0.01) as watchdog:
        one = ServiceHere("collector", bus, None, watchdog)
        one.context.counters["ready"] = 1
        ShownWindows(one.context.metrics)

        async def block() -> None:
            for _ in range(5):
                begin_s = time.process_time()
                while time.process_time() < begin_s + 0.1:
                    pass
                await asyncio.sleep(0.02)

        monkeypatch.setattr(collector_shown.os, "cpu_count", lambda: 4)
        took = await record({"collector": one.scrape}, block(), without=others)
        blocked = {"collector": took["collector"]._replace(seconds=1.0)}  # at least half of it computing
        quiet = {"collector": blocked["collector"]._replace(before=blocked["collector"].after)}
        check_alerts(tmp_path, Phase(30, quiet, set()), Phase(30, blocked, {firing}), Phase(30, quiet, set()))


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(alert_trials.RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


def test_every_alert_is_tried_here_and_has_an_entry_of_the_runbook() -> None:
    tried = set(re.findall(r'"(Dynamix\w+)"', Path(__file__).read_text()))
    assert {rule["alert"] for rule in rules()} == tried
    headings = re.findall(r"^### (Dynamix\w+)$", (ROOT / "docs/runbook.md").read_text(), flags=re.MULTILINE)
    assert {rule["alert"] for rule in rules()} == set(headings)
    for rule in rules():
        assert rule["annotations"]["runbook"] == f"docs/runbook.md#{rule['alert'].lower()}"
        assert rule["annotations"]["summary"].endswith((".", "?"))
        assert rule["labels"]["severity"] in {"info", "warning", "critical"}


def test_a_rule_that_is_never_raised_would_be_found(tmp_path: Path) -> None:
    down = {"reward": Recorded(None, None, 1.0)}
    with pytest.raises(AssertionError, match="DynamixServiceDown"):
        check_alerts(tmp_path, Phase(20, down, set()))
