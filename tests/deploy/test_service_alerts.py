"""Every alert about a service is raised by the fault that it is for, and by no other of these, and clears again.

The services are real and here; a fault is scraped while it lasts, and promtool goes on with it for twenty minutes.
"""

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from tests.support import alert_trials, examples
from tests.support.alert_trials import Phase, Recorded, Sample, check_alerts, needs, record
from tests.support.brokers import ConfiguredServer, connected, publish_states, publish_unstored, until
from tests.support.control_plane import NODE, one_node_job, report_of
from tests.support.lagging_copy import LaggingCopy
from tests.support.scraped_plane import EQUAL, ScrapedPlane
from tests.support.services_here import ServiceHere, services_here

from dynamix.arbitrator import shown as arbitrator_shown
from dynamix.arbitrator.learning.service import LearnerSettings, _Learner
from dynamix.arbitrator.learning.updating import Outcome
from dynamix.cli.commands.doctor import bus as doctor
from dynamix.cli.commands.doctor.check import DoctorCheck
from dynamix.collector import shown as collector_shown
from dynamix.collector import turns
from dynamix.collector.ebpf.syscall import ProgramInfo
from dynamix.collector.shown import ShownWindows
from dynamix.runtime.bus import Bus
from dynamix.runtime.bus.broker.requests import Answer
from dynamix.runtime.bus.provision import provision
from dynamix.runtime.health.watchdog import Watchdog
from dynamix.runtime.metrics import scrape as scraping
from dynamix.runtime.settings import BusSettings
from dynamix.schemas import subjects
from dynamix.schemas.streams import FEED

pytestmark = needs("promtool")


async def test_a_broker_that_is_away(plane: ScrapedPlane, tmp_path: Path) -> None:
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


async def test_a_service_that_is_down(plane: ScrapedPlane, tmp_path: Path) -> None:
    before = await plane.record()
    down = before | {"reward": Recorded(None, None, 1.0)}
    check_alerts(
        tmp_path,
        Phase(20, before, set()),
        Phase(20, down, {"DynamixServiceDown"}),
        Phase(20, before, set()),
    )


async def test_a_stream_that_is_full(plane: ScrapedPlane, tmp_path: Path) -> None:
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


async def test_a_feed_that_is_flooded(plane: ScrapedPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Junk fills FEED within seconds; then it is old junk, as it is in a day."""
    monkeypatch.setattr(arbitrator_shown, "STREAMS_EVERY_S", 0.05)
    small = msgspec.structs.replace(FEED, max_bytes=1 << 20)
    monkeypatch.setattr(arbitrator_shown, "FEED", small)
    await provision(plane.bus, [small])
    await plane.shows("arbitrator", "feed_full_ratio", 0)
    before = await plane.record()
    for number in range(5):
        await plane.bus.publish_bytes(subjects.of("report", "junk", "x"), bytes(500_000), f"junk-{number}")
    await plane.scraped("arbitrator", lambda text: 'feed_full_ratio{component="arbitrator"} 0.9' in text)
    flooded = await plane.record()
    await provision(plane.bus, [FEED])
    monkeypatch.setattr(arbitrator_shown, "FEED", FEED)
    await plane.scraped("arbitrator", lambda text: 'feed_full_ratio{component="arbitrator"} 0.9' not in text)
    check_alerts(
        tmp_path,
        Phase(20, before, set()),
        Phase(20, flooded, {"DynamixFeedFlooded"}),
        Phase(20, await plane.record(), set()),
    )


@pytest.mark.parametrize(("stream", "wanted"), [("FEED", ("state", "any", "x")), ("ACTIONS", ("action", "any"))])
async def test_a_stream_with_consumers_without_end(
    plane: ScrapedPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: str, wanted: tuple[str, ...]
) -> None:
    """A client with an operator's key makes them, at once or little by little."""
    monkeypatch.setattr(arbitrator_shown, "STREAMS_EVERY_S", 0.05)
    name, filtered = f'stream_consumers{{component="arbitrator",stream="{stream}"}} ', subjects.of(*wanted)
    await plane.scraped("arbitrator", lambda text: name in text)
    before = await plane.record()

    async def make(name: str) -> None:
        config = {"name": name, "ack_policy": "none", "mem_storage": True, "filter_subject": filtered}
        body = {"stream_name": stream, "config": config, "action": "create"}
        await plane.bus.requests.ask(f"CONSUMER.CREATE.{stream}.{name}.{filtered}", body, Answer)

    for start in range(0, 550, 50):
        await asyncio.gather(*[make(f"crowd-{number}") for number in range(start, start + 50)])
    await plane.scraped("arbitrator", lambda text: f"{name}55" in text)
    crowded = await plane.record()
    scraped = crowded["arbitrator"].after
    assert scraped is not None
    (counted,) = [key for key in scraped if "stream_consumers" in key and f'"{stream}"' in key]
    many = scraped | {counted: Sample(is_counter=False, value=4501.0)}
    check_alerts(
        tmp_path,
        Phase(20, before, set()),
        Phase(10, crowded, {"DynamixConsumersCrowded"}),
        Phase(20, crowded, set()),
        Phase(30, {**crowded, "arbitrator": Recorded(many, many, 1.0)}, {"DynamixConsumersCrowded"}),
        Phase(20, before, set()),
    )


async def test_a_feed_with_junk(plane: ScrapedPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages that no service reads, such as a learner's key may send; a job trains beside them."""
    monkeypatch.setattr(arbitrator_shown, "STREAMS_EVERY_S", 0.05)
    job = one_node_job()
    await plane.bus.publish(job)
    await plane.scraped("arbitrator", lambda text: 'stream_stored_total{component="arbitrator",stream="FEED"}' in text)
    calm = await plane.record(plane.train(job, 20))
    stored = 'stream_stored_total{component="arbitrator",stream="FEED"} '

    async def send_junk() -> None:
        sequence = (await plane.bus.stream_state(FEED.name)).last_sequence
        await publish_states(plane.bus, range(3000), subjects.of("event", "junk"))
        await plane.shows("arbitrator", "stream_stored_total", sequence + 3000, stream=FEED.name)

    flooded = await plane.record(send_junk())
    assert stored in plane.services["arbitrator"].scrape()
    check_alerts(
        tmp_path,
        Phase(20, calm, set()),
        Phase(3, flooded, {"DynamixFeedJunk"}),
        Phase(20, await plane.record(), set()),
    )


async def test_requests_without_end(plane: ScrapedPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client asks for the state of a stream in a loop. An arbitrator that opens a crowd of jobs asks much, too."""
    monkeypatch.setattr(arbitrator_shown, "STREAMS_EVERY_S", 1.0)
    await plane.scraped("arbitrator", lambda text: "broker_requests_total{" in text)
    before = await plane.record()

    async def ask() -> None:
        counted = await plane.bus.count_requests()
        for _ in range(30):
            await asyncio.gather(*[plane.bus.stream_state(FEED.name) for _ in range(100)])
        assert await plane.bus.count_requests() - counted >= 3000
        await plane.scraped("arbitrator", lambda text: shown_requests(text) >= counted + 3000)

    asking = await plane.record(ask())
    scraped = asking["arbitrator"]
    assert scraped.before is not None
    assert scraped.after is not None
    (waiting,) = [name for name in scraped.after if name.startswith("dynamix_jobs_waiting{")]
    crowd = {waiting: Sample(is_counter=False, value=17.0)}
    opening = scraped._replace(before=scraped.before | crowd, after=scraped.after | crowd)
    check_alerts(
        tmp_path,
        Phase(20, before, set()),
        Phase(5, asking, {"DynamixRequestsFlooded"}),
        Phase(20, await plane.record(), set()),
        Phase(5, {**asking, "arbitrator": opening}, set()),
    )


def shown_requests(text: str) -> float:
    (line,) = [line for line in text.splitlines() if line.startswith("dynamix_broker_requests_total{")]
    return float(line.split()[1])


class ShortOfQueue(ConfiguredServer):
    """A broker that refuses what comes while five messages wait to be stored; by default it is 10,000."""

    def _config(self, store: Path) -> str:
        return super()._config(store).replace("sync_interval:", "max_buffered_msgs: 5\n  sync_interval:")


async def test_a_broker_that_has_too_much_to_store(tmp_path: Path) -> None:
    """A client floods it with small messages, while the services of a job publish theirs."""
    async with ShortOfQueue() as server, connected(server.settings) as bus, connected(server.settings) as flooding:
        await provision(bus)
        async with services_here(bus, "collector", "reward", "arbitrator") as services:
            plane, job = ScrapedPlane(server, bus, services), one_node_job()
            await bus.publish(job)
            before = await plane.record(plane.train(job, 1))

            async def flood() -> None:
                async with asyncio.TaskGroup() as group:
                    training = group.create_task(plane.train(job, 30))
                    while not bus.counters["too_many_requests"] and not training.done():
                        for _ in range(200):
                            await publish_unstored(flooding, subjects.of("report", "junk", "x"), b"junk")
                        await flooding.flush()
                        await asyncio.sleep(0)
                    training.cancel()

            flooded = await plane.record(flood())
            check_alerts(
                tmp_path,
                Phase(20, before, set()),
                Phase(2, flooded, {"DynamixBrokerFlooded"}),
                Phase(25, await plane.record(), set()),
            )


async def test_a_collector_that_passes_over_reports(
    plane: ScrapedPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job sends them faster than windows are made of them; by default 16,384 may wait."""
    monkeypatch.setattr(turns, "MAX_WAITING", 16)
    job = one_node_job()
    await plane.bus.publish(job)
    before = await plane.record()

    async def pass_over() -> None:
        reports = [report_of(job, window, (128,) * 4, EQUAL) for window in range(60)]
        await asyncio.gather(*[await plane.bus.publish_soon(report) for report in reports])
        await until(lambda: plane.services["collector"].context.counters.get("reports_passed_over"))

    flooded = await plane.record(pass_over())
    await plane.shows("arbitrator", "job_decided_window", 59, training_job=job.job)
    check_alerts(
        tmp_path,
        Phase(20, before, set()),
        Phase(2, flooded, {"DynamixCollectorFlooded"}),
        Phase(25, await plane.record(), set()),
    )


async def test_a_copy_of_a_stream_that_lags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three servers, one that is kept from the log of FEED, and then catches up; `dynamix doctor` names it, too."""
    monkeypatch.setattr(arbitrator_shown, "STREAMS_EVERY_S", 0.05)
    monkeypatch.setattr(doctor, "LISTEN_S", 0.1)
    async with LaggingCopy() as servers, connected(servers.settings) as bus:
        await provision(bus, num_replicas=3)
        await servers.until_current(bus)
        leader = (await servers.leader_of(bus, FEED.name)).name
        behind = next(name for name in servers.servers if name != leader)
        async with services_here(bus, "collector", "reward", "arbitrator") as services:
            plane = ScrapedPlane(next(iter(servers.servers.values())), bus, services)
            await plane.scraped("arbitrator", lambda text: "stream_consumers" in text)
            before = await plane.record()
            assert (await copies_check(servers.settings)).present

            await servers.keep_behind(bus, FEED.name, behind)
            await publish_states(bus, range(3), subjects.of("report", "other", "x"))
            lag = f'dynamix_stream_copy_lag{{component="arbitrator",server="{behind}",stream="FEED"}} '
            await plane.scraped("arbitrator", lambda text: lag in text)
            lagging = await plane.record()
            found = await copies_check(servers.settings)
            assert found.found.startswith(f"FEED: leader {leader}, 2 other copies; {behind} is not current, lags by ")
            assert "restart nats-server there" in found.fix
            assert not found.present
            assert not found.is_fatal

            servers.let_catch_up()
            await servers.until_current(bus)
            await plane.scraped("arbitrator", lambda text: lag not in text)
            check_alerts(
                tmp_path,
                Phase(20, before, set()),
                Phase(20, lagging, {"DynamixStreamCopyLags"}),
                Phase(20, await plane.record(), set()),
            )


async def copies_check(settings: BusSettings) -> DoctorCheck:
    (found,) = [check for check in await doctor.bus(settings, configured=True) if check.name == "copies"]
    return found


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


async def test_messages_that_nothing_can_be_made_of(plane: ScrapedPlane, tmp_path: Path) -> None:
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
