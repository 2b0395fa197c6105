"""Every alert about the broker and its streams is raised by the fault that it is for, and clears again.

The broker is real; a fault is scraped while it lasts, and promtool goes on with it for twenty minutes.
"""

import asyncio
from pathlib import Path

import msgspec
import pytest
from tests.support import examples
from tests.support.alert_trials import Phase, Sample, check_alerts, needs
from tests.support.brokers import ConfiguredServer, connected, publish_states, publish_unstored, until
from tests.support.control_plane import NODE, one_node_job
from tests.support.lagging_copy import LaggingCopy
from tests.support.scraped_plane import ScrapedPlane
from tests.support.services_here import services_here

from dynamix.arbitrator import shown as arbitrator_shown
from dynamix.cli.commands.doctor import DoctorCheck
from dynamix.cli.commands.doctor import bus as doctor
from dynamix.runtime.bus.broker.connection import BrokerConnection
from dynamix.runtime.bus.provision import provision
from dynamix.runtime.settings import BusSettings
from dynamix.schemas import subjects
from dynamix.schemas.streams import ACTIONS, FEED, PROFILES

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


async def test_an_operation_that_the_broker_refuses_another_client(plane: ScrapedPlane, tmp_path: Path) -> None:
    log = tmp_path / "nats.log"
    log.write_text("[ERR] an older Publish Violation\n")
    shown = arbitrator_shown.ShownDecisions(plane.services["arbitrator"].context.metrics)
    following = asyncio.create_task(shown.follow_violations(log))
    name = 'broker_violations_total{component="arbitrator"}'
    await plane.scraped("arbitrator", lambda text: f"{name} 0.0" in text)
    before = await plane.record()

    async def be_refused() -> None:
        with log.open("a") as lines:
            lines.write('[INF] something else\n[ERR] Publish Violation - JWT User "U1", Subject "x"\n')
        await plane.scraped("arbitrator", lambda text: f"{name} 1.0" in text)
        log.rename(tmp_path / "nats.log.1")
        log.write_text("[ERR] Subscription Violation\n")
        await plane.scraped("arbitrator", lambda text: f"{name} 2.0" in text)

    refused = await plane.record(be_refused())
    check_alerts(
        tmp_path,
        Phase(20, before, set()),
        Phase(5, refused, {"DynamixOperationsRefused"}),
        Phase(25, await plane.record(), set()),
    )
    following.cancel()


async def test_a_credential_that_expires_soon(
    plane: ScrapedPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = []
    for days in (31, 29):
        monkeypatch.setattr(BrokerConnection, "seconds_left", days * 86400.0)
        recorded.append(await plane.record())
    check_alerts(tmp_path, Phase(20, recorded[0], set()), Phase(20, recorded[1], {"DynamixCredentialExpires"}))


@pytest.mark.parametrize(
    ("stream", "kind"), [(FEED.name, "event"), (ACTIONS.name, "action"), (PROFILES.name, "profile")]
)
async def test_a_stream_with_junk(
    plane: ScrapedPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: str, kind: str
) -> None:
    """Such as an arbitrator's key may send; a job trains beside it."""
    monkeypatch.setattr(arbitrator_shown, "STREAMS_EVERY_S", 0.05)
    stored = f'stream_stored_total{{component="arbitrator",stream="{stream}"}} '
    job = one_node_job()
    await plane.bus.publish(job)
    await plane.scraped("arbitrator", lambda text: stored in text)
    calm = await plane.record(plane.train(job, 20))

    async def send_junk() -> None:
        sequence = (await plane.bus.stream_state(stream)).last_sequence
        await publish_states(plane.bus, range(3000), subjects.of(kind, "junk"))
        await plane.shows("arbitrator", "stream_stored_total", sequence + 3000, stream=stream)

    flooded = await plane.record(send_junk())
    check_alerts(
        tmp_path,
        Phase(20, calm, set()),
        Phase(3, flooded, {"DynamixStreamJunk"}),
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


async def test_a_copy_of_a_stream_that_lags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of three servers is kept from the log of FEED, and then catches up; `dynamix doctor` names it, too."""
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
