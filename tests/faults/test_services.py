"""Services of a job that reports: killed, doubled, without a broker or room, after a clock step, fed with nonsense."""

import asyncio
import functools
import hashlib
import json
import os
import random
import signal
from collections import Counter
from datetime import datetime
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.support import examples
from tests.support.arbitrators import Feeding
from tests.support.bus_watch import watching
from tests.support.control_plane import NODE, ControlPlane, feed_windows, one_node_job, report_of
from tests.support.decision_checks import check_all_there, check_decisions, recorded_states
from tests.support.faults import Figure, Scale
from tests.support.server_cluster import Bystander

from dynamix.cli.services import SERVICES
from dynamix.runtime.bus.provision import provision
from dynamix.schemas import subjects
from dynamix.schemas.codec import encode
from dynamix.schemas.messages import Dead
from dynamix.schemas.streams import DEAD, FEED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
SIZES, SPEEDS = (128,) * 4, (3000.0, 3000.0, 2000.0, 1000.0)


@pytest.mark.usefixtures("services")
async def test_killed_collectors_and_reward_services_resume_where_they_stopped(
    plane: ControlPlane, scale: Scale, chance: random.Random, figure: Figure
) -> None:
    """A kill every 20 windows or so, then some windows without the service, then its next start."""
    num_kills, job, window = scale(3, 20), one_node_job(), 0
    await plane.bus.publish(job)
    for _ in range(num_kills):
        name, before, without = chance.choice(["collector", "reward"]), chance.randint(5, 15), chance.randint(3, 10)
        feeding = asyncio.create_task(feed_windows(plane, job, range(window, window + before)))
        await asyncio.sleep(0.04 * before * chance.random())  # the moment of the crash
        plane.services[name].kill()
        await feeding
        await feed_windows(plane, job, range(window + before, window + before + without))
        window += before + without
        await plane.start(name)
    await check_all_there(plane, job, window)
    figure("kills", num_kills)
    figure("windows", window)


@pytest.mark.usefixtures("services")
async def test_replicas_of_collector_and_reward_give_each_output_once(
    plane: ControlPlane, scale: Scale, figure: Figure
) -> None:
    """Equal identities: the broker keeps one. Which of two collectors read the kernel is no matter."""
    half, job = scale(20, 150), one_node_job()
    await plane.bus.publish(job)
    seconds = [plane.another(name, {"DYNAMIX_INSTANCE": f"second-{name}"}) for name in ("collector", "reward")]
    async with watching(plane.bus, job.job) as watch:
        for second in seconds:
            second.start()
        try:
            await watch.until(lambda: bool(watch.counter("second-collector", "ready", "collector")))
            await watch.until(lambda: bool(watch.counter("second-reward", "ready", "reward")))
            await feed_windows(plane, job, range(half))
            for name in ("collector", "reward"):
                plane.services[name].kill()
            await feed_windows(plane, job, range(half, 2 * half))
            await check_all_there(plane, job, 2 * half)
            assert all(second.exit_code() is None for second in seconds)
        finally:
            for second in seconds:
                second.stop()
    figure("windows", 2 * half)


# --- the broker is killed ---


@pytest.mark.usefixtures("services")
async def test_no_acknowledged_message_is_missing_after_broker_kills(
    plane: ControlPlane, scale: Scale, chance: random.Random, figure: Figure
) -> None:
    """Reports go in all the time; every one becomes a window, a state, a reward and, with the others, actions."""
    num_kills, every_s, job = scale(2, 15), scale(1.5, 4.0), one_node_job()
    await plane.bus.publish(job)
    # messages without a reader, so that the broker is storing when it is killed
    bystander = Bystander(plane.bus, 0, pause_s=0)
    feeding = Feeding(functools.partial(feed_windows, plane, job, every_s=0.05))
    for _ in range(num_kills):
        await asyncio.sleep(every_s * chance.uniform(0.6, 0.9))  # the time between two crashes
        await plane.server.kill()
        await asyncio.sleep(every_s * 0.1)  # the outage
        await plane.server.start()
    num_windows = await feeding.finish()
    num_missing = await bystander.num_lost()
    await check_all_there(plane, job, num_windows)
    assert all(service.exit_code() is None for service in plane.services.values())
    assert num_missing == 0
    figure("broker_kills", num_kills)
    figure("acknowledged", bystander.num_acknowledged + num_windows)
    figure("acknowledged_and_missing", num_missing)


# --- FEED is full: metric windows are dropped first ---


async def fill(plane: ControlPlane) -> None:
    """Let FEED refuse everything that comes, as it does where nothing may be discarded."""
    config = await plane.bus.requests.stream_config(FEED.name)
    full = (await plane.bus.stream_state(FEED.name)).num_bytes
    await plane.bus.requests.write_stream("UPDATE", {**config, "discard": "new", "max_bytes": full})


@pytest.mark.usefixtures("services")
async def test_a_full_feed_drops_windows_first_and_stores_every_decision(
    plane: ControlPlane, scale: Scale, figure: Figure
) -> None:
    """The window of a report is dropped, its state waits until there is room."""
    job, rounds, num_windows = one_node_job(), scale(2, 10), 0
    await plane.bus.publish(job)
    async with watching(plane.bus, job.job) as watch:
        for shed in range(rounds):
            os.kill(plane.services["arbitrator"].pid, signal.SIGSTOP)
            num_windows += 5
            for window in range(num_windows - 5, num_windows):
                await plane.bus.publish(report_of(job, window, SIZES, SPEEDS))
            await plane.wait_for(FEED.name, subjects.of("reward", job.job, "*"), num_windows - shed)
            await fill(plane)
            await plane.bus.publish(report_of(job, num_windows, SIZES, SPEEDS))
            await watch.until(lambda num=shed + 1: watch.counter(NODE, "windows_shed", "collector") == num)
            os.kill(plane.services["arbitrator"].pid, signal.SIGCONT)
            await watch.until_decided(num_windows)
            await provision(plane.bus)
            num_windows += 1
            await watch.until_decided(num_windows)
        rewards = await plane.wait_for(FEED.name, subjects.of("reward", job.job, "*"), num_windows - rounds)
        assert len(rewards) == num_windows - rounds
        assert all(service.exit_code() is None for service in plane.services.values())
    await check_decisions(plane.bus, job, num_windows=num_windows)
    states = {state.window for _, state in await recorded_states(plane.bus, job)}
    assert states == set(range(num_windows))
    figure("windows_shed", num_windows - len(rewards))
    figure("states_missing", num_windows - len(states))


# --- the wall clock jumps ---

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


# --- messages that services cannot read ---

READERS = {"report": "collector", "window": "reward", "state": "arbitrator"}


def payloads(kind: str) -> list[bytes]:
    """Payloads that the kind's reader cannot use."""
    message = {"report": examples.report(NODE), "window": examples.window(NODE), "state": examples.state(NODE)}[kind]
    good = encode(message)
    newer = bytes([*good[:2], good[2] + 1, *good[3:]])
    ranks, generation = examples.state(NODE, (0, 1)), examples.state(NODE, (0, 1, 2, 3), generation=5)
    foreign = [encode(examples.state("node-c", (0, 1))), encode(ranks), encode(generation)] if kind == "state" else []
    return [b"", b"\x00\xff random", good[: len(good) // 2], newer, *foreign]


async def publish_raw(plane: ControlPlane, subject: bytes) -> None:
    """Publish as any client of the broker can, without our checks."""
    settings = plane.server.settings
    url = urlsplit(settings.url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    await reader.readline()  # INFO
    options = {"user": settings.user, "pass": settings.password, "verbose": False, "pedantic": False}
    writer.write(b"CONNECT " + json.dumps(options).encode() + b"\r\nPUB " + subject + b" 1\r\n?\r\nPING\r\n")
    await writer.drain()
    assert await reader.readline() == b"PONG\r\n"
    writer.close()
    await writer.wait_closed()


@pytest.mark.usefixtures("services")
async def test_every_service_counts_undecodable_messages_and_continues(plane: ControlPlane, figure: Figure) -> None:
    """Between two of them a good report leads to a reward and an action."""
    sent: Counter[str] = Counter()
    job, window = one_node_job(), 0
    await plane.bus.publish(job)
    for kind, reader in READERS.items():
        for payload in payloads(kind):
            identity = hashlib.sha256(kind.encode() + payload).hexdigest()
            await plane.bus.publish_bytes(subjects.of(kind, job.job, NODE), payload, identity)
            sent[reader] += 1
            await plane.bus.publish(report_of(job, window, SIZES, SPEEDS))
            window += 1
    await plane.bus.publish_bytes(subjects.of("state", job.job, "node-c"), encode(examples.state("node-c")), "other")
    await publish_raw(plane, b"dynamix.v1.report.\xff\xfe.a.node-a")
    sent.update(("arbitrator", "collector"))
    await plane.wait_for_actions(window)
    async with watching(plane.bus, job.job) as watch:
        for service, count in sent.items():
            counted = functools.partial(watch.counter, NODE, "dead_letters", service)
            await watch.until(lambda counted=counted, count=count: counted() >= count)
            assert counted() == count
    assert all(service.exit_code() is None for service in plane.services.values())
    await check_decisions(plane.bus, job, num_windows=window)
    await publish_raw(plane, b"dynamix.v1.job.\xff\xfe.a")  # is read by an arbitrator that starts
    plane.services["arbitrator"].kill()
    await plane.start("arbitrator")
    await plane.bus.publish(report_of(job, window, SIZES, SPEEDS))
    await plane.wait_for_actions(window + 1)
    letters = await plane.messages(DEAD.name, f"{subjects.ROOT}.dead.>")
    assert {letter.service for letter in letters if isinstance(letter, Dead) and letter.reason} == set(sent)
    assert any(f"{subjects.ROOT}.job." in str(letter) for letter in letters)
    figure("undecodable_messages", sum(sent.values()))
