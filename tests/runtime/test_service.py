"""The life of a service, as real processes: exit codes, signals, heartbeat, closed connections."""

import asyncio
import json
import os
import signal
from asyncio.subprocess import Process
from typing import Any

import pytest
import structlog
from msgspec.structs import replace
from tests.support import examples
from tests.support.brokers import ConfiguredServer, publish_states, until
from tests.support.small_service import SmallSettings, main, service_process

from dynamix.runtime import service as frame
from dynamix.runtime.bus import Bus
from dynamix.runtime.bus.provision import provision
from dynamix.schemas import codec
from dynamix.schemas.messages import Live
from dynamix.schemas.streams import FEED


async def heartbeat(bus: Bus) -> Live:
    async with bus.subscribe("dynamix.v1.live.collector.*") as messages:
        message = await anext(messages)
    return codec.decode(Live, message.subject, message.payload)


async def end(process: Process) -> tuple[int, str, list[dict[str, Any]]]:
    """Exit code, what stderr says as a whole, and its log lines."""
    _, stderr = await process.communicate()
    text = stderr.decode()
    return process.returncode, text, [json.loads(line) for line in text.splitlines() if line.startswith("{")]


async def test_sigterm_ends_the_intake_and_everything_published_is_stored(server: ConfiguredServer, bus: Bus) -> None:
    async with service_process(server) as process:
        await heartbeat(bus)
        await publish_states(bus, range(500))
        async with bus.consume("FEED", ["dynamix.v1.window.>"], start="all") as windows:
            await anext(windows)
        process.send_signal(signal.SIGTERM)
        code, _, lines = await end(process)
    assert code == 0
    assert [line["event"] for line in lines][-2:] == ["intake ended", "stopped"]
    assert lines[-2]["stop"] is True
    last = await bus.last("FEED", "dynamix.v1.window.job.1.node-a")
    assert last is not None


@pytest.mark.parametrize(
    ("mode", "code", "event", "reason"),
    [
        ("fail", 1, "failed", "RuntimeError: made to fail"),
        ("refuse", 2, "cannot start", "made to refuse: use another mode"),
        ("consume", 1, "cannot go on", "run `dynamix provision`"),  # there are no streams
    ],
)
async def test_a_service_that_fails_exits_with_a_code_and_logs_why(
    server: ConfiguredServer, mode: str, code: int, event: str, reason: str
) -> None:
    """A traceback is logged only for a programming error."""
    async with service_process(server, "--mode", mode) as process:
        found, text, lines = await end(process)
    assert found == code
    (failure,) = [line for line in lines if line["level"] == "error"]
    assert failure["event"] == event
    assert reason in failure["exception" if mode == "fail" else "reason"]
    assert ("Traceback" in text) == (mode == "fail")


async def test_a_closed_connection_ends_the_process_with_1(server: ConfiguredServer, bus: Bus) -> None:
    async with service_process(server) as process:
        await heartbeat(bus)
        server._password = "rotated"
        server.reload()
        code, _, lines = await end(process)
    assert code == 1
    assert "ends because the connection is closed" in [line["event"] for line in lines]


def test_settings_that_cannot_be_used_exit_with_2_and_help_is_printed_without_a_broker(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert frame.run("collector", SmallSettings, main, ["--mdoe", "x"]) == 2
    refused = capsys.readouterr().err
    assert refused == "dynamix collector: unknown argument '--mdoe': did you mean --mode?\n"
    assert frame.run("collector", SmallSettings, main, ["--help"]) == 0
    assert "consume, fail, refuse, finish, ignore-stop or block." in capsys.readouterr().out


@pytest.mark.parametrize("stops", [False, True])
async def test_a_refused_message_waits_until_there_is_room_or_the_service_stops(bus: Bus, stops: bool) -> None:
    context = frame.Context(
        *("collector", "one", "node-a", bus, SmallSettings(), asyncio.Event(), structlog.stdlib.get_logger())
    )
    await provision(bus, [replace(FEED, max_bytes=100, discard="new")])
    task = asyncio.create_task(context.publish_when_room(examples.state()))
    await until(lambda: context.counters["waits_for_room"])
    if stops:
        context.stop.set()
    else:
        await provision(bus, [FEED])
    assert await task is not stops
    assert (await bus.stream_state(FEED.name)).num_messages == (0 if stops else 1)


async def test_a_service_that_ignores_the_signal_is_ended(
    server: ConfiguredServer, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame, "STOP_TIMEOUT_S", 0.2)
    loaded = frame.Loaded(
        frame.load("collector", SmallSettings, []).shared, server.settings, SmallSettings(mode="ignore-stop")
    )
    living = asyncio.create_task(frame._live("collector", loaded, main))
    await heartbeat(bus)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await living == 1
