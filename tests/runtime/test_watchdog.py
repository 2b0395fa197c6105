"""A stuck process ends itself; a stopped one does not. Real processes."""

import asyncio
import signal
from pathlib import Path

from tests.runtime.test_service import heartbeat
from tests.support.brokers import ConfiguredServer
from tests.support.small_service import service_process

from dynamix.runtime.bus import Bus

BLOCK = ("--mode", "block")


async def test_a_process_whose_loop_is_stuck_ends_with_1_and_says_where(
    server: ConfiguredServer, bus: Bus, tmp_path: Path
) -> None:
    trigger = tmp_path / "now"
    async with service_process(server, *BLOCK, "--trigger", str(trigger), "--stuck-after-s", "1") as process:
        assert (await heartbeat(bus)).counters["loop_lag_ms"] < 1000
        trigger.touch()
        _, stderr = await process.communicate()
    assert process.returncode == 1
    assert b"in sit_still" in stderr
    assert b"this process ends, so that it is started again" in stderr


async def test_a_loop_that_comes_back_in_time_lives_and_its_lag_is_in_the_heartbeat(
    server: ConfiguredServer, bus: Bus, tmp_path: Path
) -> None:
    trigger = tmp_path / "now"
    arguments = ("--trigger", str(trigger), "--block-s", "0.8", "--stuck-after-s", "15")
    async with service_process(server, *BLOCK, *arguments) as process:
        await heartbeat(bus)
        trigger.touch()
        live = await heartbeat(bus)
        lags = [live.counters["loop_lag_ms"]]
        while not live.counters.get("awake_again"):
            live = await heartbeat(bus)
            lags.append(live.counters["loop_lag_ms"])
        assert max(lags) >= 600  # of the 800 ms, less the way to the next tick
        assert process.returncode is None


async def test_a_process_that_was_stopped_for_longer_than_the_limit_goes_on(
    server: ConfiguredServer, bus: Bus, tmp_path: Path
) -> None:
    async with service_process(server, *BLOCK, "--trigger", str(tmp_path / "never"), "--stuck-after-s", "1") as process:
        before = (await heartbeat(bus)).uptime_s
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(2.5)  # the time itself is what is tried
        process.send_signal(signal.SIGCONT)
        live = await heartbeat(bus)
        while live.uptime_s < before + 4:  # more than the limit after it went on
            live = await heartbeat(bus)
        assert process.returncode is None
