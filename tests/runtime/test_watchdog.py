"""A stuck process ends itself; a stopped one does not. Real processes."""

import asyncio
import signal
import time
from asyncio.subprocess import Process
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from tests.support.brokers import ConfiguredServer
from tests.support.service_processes import service_process

from dynamix.runtime.bus import Bus
from dynamix.runtime.bus.health import Blocked, Watchdog
from dynamix.schemas import codec
from dynamix.schemas.messages import Live


def started(server: ConfiguredServer, *arguments: str) -> AbstractAsyncContextManager[Process]:
    return service_process(server, "tests.support.stuck_service", *arguments)


async def beat(bus: Bus) -> Live:
    """The next heartbeat."""
    async with asyncio.timeout(20), bus.subscribe("dynamix.v1.live.reward.*") as messages:
        message = await anext(messages)
    return codec.decode(Live, message.subject, message.payload)


async def test_a_process_whose_loop_is_stuck_ends_with_1_and_says_where(
    server: ConfiguredServer, bus: Bus, tmp_path: Path
) -> None:
    trigger = tmp_path / "now"
    async with started(server, "--trigger", str(trigger), "--stuck-after-s", "1") as process:
        assert (await beat(bus)).counters["loop_lag_ms"] < 1000
        trigger.touch()
        async with asyncio.timeout(30):
            _, stderr = await process.communicate()
    assert process.returncode == 1
    assert b"in sit_still" in stderr
    assert b"this process ends, so that it is started again" in stderr


async def test_a_loop_that_comes_back_in_time_lives_and_its_lag_is_in_the_heartbeat(
    server: ConfiguredServer, bus: Bus, tmp_path: Path
) -> None:
    trigger = tmp_path / "now"
    arguments = ("--trigger", str(trigger), "--block-s", "0.8", "--stuck-after-s", "15")
    async with started(server, *arguments) as process:
        await beat(bus)
        trigger.touch()
        live = await beat(bus)
        lags = [live.counters["loop_lag_ms"]]
        while not live.counters.get("awake_again"):
            live = await beat(bus)
            lags.append(live.counters["loop_lag_ms"])
        assert max(lags) >= 600  # of the 800 ms, less the way to the next tick
        assert process.returncode is None


async def test_a_process_that_was_stopped_for_longer_than_the_limit_goes_on(
    server: ConfiguredServer, bus: Bus, tmp_path: Path
) -> None:
    async with started(server, "--trigger", str(tmp_path / "never"), "--stuck-after-s", "1") as process:
        before = (await beat(bus)).uptime_s
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(2.5)  # the time itself is what is tried
        process.send_signal(signal.SIGCONT)
        live = await beat(bus)
        while live.uptime_s < before + 4:  # more than the limit after it went on
            live = await beat(bus)
        assert process.returncode is None


async def test_one_that_only_measures_starts_no_thread() -> None:
    async with Watchdog(0.0) as measuring:
        time.sleep(0.3)  # noqa: ASYNC251 - what it shall see
        assert measuring._thread is None
        assert measuring.take_max_lag_s() >= 0.15


def test_a_loop_without_ticks_is_blocked_for_as_long_as_the_thread_looked() -> None:
    blocked = Blocked(0.5, now_s=100.0)
    assert [blocked.look(0, 100.0 + 0.5 * look) for look in range(1, 5)] == [0.5, 1.0, 1.5, 2.0]


def test_a_tick_resets_the_blocked_time() -> None:
    blocked = Blocked(0.5, now_s=100.0)
    assert [blocked.look(ticks, 100.5 + 0.5 * ticks) for ticks in (0, 1, 2)] == [0.5, 0.0, 0.0]
    assert blocked.look(2, 102.0) == 0.5


def test_an_hour_in_which_the_thread_did_not_run_counts_as_a_second() -> None:
    blocked = Blocked(0.5, now_s=100.0)
    assert [blocked.look(0, 100.0 + 3600 * look) for look in range(1, 4)] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("value", ["0.5", "-1", "nan", "inf"])
async def test_a_limit_that_would_end_healthy_processes_is_refused(server: ConfiguredServer, value: str) -> None:
    async with started(server, "--stuck-after-s", value) as process:
        _, stderr = await process.communicate()
    assert process.returncode == 2
    assert b"stuck_after_s must be 0 (never) or at least 1 second" in stderr
