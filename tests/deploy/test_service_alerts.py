"""Every alert about a service is raised by the fault that it is for, and by no other of these, and clears again.

The services are real and here; a fault is scraped while it lasts, and promtool goes on with it for twenty minutes.
"""

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.support import alert_trials
from tests.support.alert_trials import Phase, Recorded, check_alerts, needs, record
from tests.support.brokers import publish_unstored, until
from tests.support.control_plane import NODE
from tests.support.scraped_plane import ScrapedPlane
from tests.support.services_here import ServiceHere

from dynamix.arbitrator.learning.service import LearnerSettings, _Learner
from dynamix.arbitrator.learning.updating import Outcome
from dynamix.collector import shown as collector_shown
from dynamix.collector.ebpf.syscall import ProgramInfo
from dynamix.collector.shown import ShownWindows
from dynamix.runtime.bus import Bus
from dynamix.runtime.health import Watchdog
from dynamix.runtime.metrics import scrape as scraping
from dynamix.schemas import subjects

pytestmark = needs("promtool")


async def test_a_service_that_is_down(plane: ScrapedPlane, tmp_path: Path) -> None:
    before = await plane.record()
    down = before | {"reward": Recorded(None, None, 1.0)}
    check_alerts(
        tmp_path,
        Phase(20, before, set()),
        Phase(20, down, {"DynamixServiceDown"}),
        Phase(20, before, set()),
    )


async def test_a_collector_for_which_thousands_of_reports_wait(plane: ScrapedPlane, tmp_path: Path) -> None:
    before, counters = await plane.record(), plane.services["collector"].context.counters
    counters["reports_pending"] = 5_000
    flooded = await plane.record()
    counters["reports_pending"] = 0
    check_alerts(
        tmp_path,
        Phase(20, before, set()),
        Phase(2, flooded, {"DynamixCollectorFlooded"}),
        Phase(25, await plane.record(), set()),
    )


async def test_an_operation_that_the_broker_refuses_to_a_service(plane: ScrapedPlane, tmp_path: Path) -> None:
    """Its user may no longer publish what becomes of a message that it cannot use."""
    before = await plane.record()

    settings = plane.server.settings
    allowed = '{ publish: { deny: "dynamix.v1.dead.>" } }'

    async def be_refused() -> None:
        user = f'user: "{settings.user}", password: "{settings.password}", permissions: {allowed}'
        plane.server.authorization = f"users: [{{ {user} }}]"
        plane.server.reload()
        async with asyncio.timeout(60):
            while not plane.bus.counters["permission_denials"]:
                await publish_unstored(plane.bus, subjects.of("state", "job-1", NODE), b"no message")
                await asyncio.sleep(0.1)

    refused = await plane.record(be_refused())
    check_alerts(
        tmp_path,
        Phase(20, before, set()),
        Phase(5, refused, {"DynamixPermissionDenied", "DynamixDeadLetters"}),
        Phase(25, await plane.record(), set()),
    )


@pytest.mark.parametrize(("kind", "reader"), [("state", "arbitrator"), ("report", "collector")])
@pytest.mark.parametrize("payload", [b"no message", b""])
async def test_messages_that_nothing_can_be_made_of(
    plane: ScrapedPlane, tmp_path: Path, kind: str, reader: str, payload: bytes
) -> None:
    before = await plane.record()

    async def send_garbage() -> None:
        await publish_unstored(plane.bus, subjects.of(kind, "job-1", NODE), payload)
        await until(lambda: plane.services[reader].context.counters.get("dead_letters"))

    check_alerts(
        tmp_path,
        Phase(20, before, set()),
        Phase(20, await plane.record(send_garbage()), {"DynamixDeadLetters"}),
        Phase(20, await plane.record(), set()),
    )


async def test_more_samples_than_are_shown(
    plane: ScrapedPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
