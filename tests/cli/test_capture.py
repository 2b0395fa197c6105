"""`dynamix capture` on a real broker: everything of one job, in one order, and a file that is always finished."""

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support import examples
from tests.support.brokers import ConfiguredServer
from tests.support.examples import applied, event, reward

from dynamix.cli.commands import capture as command_module
from dynamix.cli.commands.capture import Source
from dynamix.cli.errors import CommandError
from dynamix.cli.jobs import chosen
from dynamix.cli.services import bus_environment
from dynamix.recording import capture
from dynamix.recording.capture import CaptureReader, CutOffError, Record
from dynamix.recording.fingerprint import fingerprint
from dynamix.runtime.bus import Bus
from dynamix.schemas.codec import encode, message_id
from dynamix.schemas.messages import Job, Message
from dynamix.schemas.subjects import BY_STRUCT, of, subject_of

OTHER = "other-99999999"
NODES = {"node-a": (0, 1), "node-b": (2, 3)}


def job(phase: str = "running", **changes: Any) -> Job:
    return examples.job(**({"phase": phase, "end_reason": "" if phase == "running" else "done"} | changes))


def window_of(window: int) -> list[Message]:
    """What a window of two nodes brings, in order."""
    found: list[Message] = []
    for node, ranks in NODES.items():
        found += [examples.report(node, ranks, window), examples.window(node, ranks, window)]
        found += [examples.state(node, ranks, window), examples.trace(node, ranks, window), reward(node, ranks, window)]
    return [*found, examples.action(window, hash=window.to_bytes(32, "big")), applied(window, window + 2)]


def story(num_windows: int) -> list[Message]:
    return [job(), *(message for window in range(num_windows) for message in window_of(window)), event(num_windows)]


async def publish(bus: Bus, messages: Iterable[Message]) -> None:
    """One after the other; with each a message of another job, which is not to be captured."""
    for message in messages:
        await bus.publish(message)
        await bus.publish(msgspec.structs.replace(message, job=OTHER))


def identities(records: Iterable[Record]) -> list[tuple[str, str, bytes]]:
    return [(one.subject, one.message_id, one.payload) for one in records]


def expected(messages: Iterable[Message]) -> list[tuple[str, str, bytes]]:
    return [(subject_of(message), message_id(message), encode(message)) for message in messages]


def finished(path: Path) -> tuple[list[tuple[str, str, bytes]], str]:
    """What a capture that was ended holds, and why it ended."""
    with CaptureReader(path) as reader:
        found = identities(list(reader))
    return found, reader.end.reason


@pytest.fixture
def address(server: ConfiguredServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment in which commands find the broker."""
    for name, value in bus_environment(server.settings).items():
        monkeypatch.setenv(name, value)


async def typed(*arguments: str) -> int:
    """A command as typed, in a process of its own: it handles signals."""
    command = await asyncio.create_subprocess_exec(sys.executable, "-m", "dynamix.cli.main", *arguments)
    return await command.wait()


async def read(bus: Bus, *, past: bool, name: str = examples.JOB) -> list[Record]:
    source = Source(bus, name, past=past, stop=asyncio.Event())
    async with asyncio.timeout(20), contextlib.aclosing(source.batches()) as batches:
        return [one async for batch in batches for one in batch]


@pytest.mark.usefixtures("address")
async def test_the_past_is_all_that_is_stored_of_the_job_in_the_order_of_storing(bus: Bus, tmp_path: Path) -> None:
    told = story(3)
    await publish(bus, told)
    forged = (of("report", examples.JOB, "node-a"), "forged", b"\xff not ours")
    await bus.publish_bytes(forged[0], forged[2], "forged")
    path, report = tmp_path / "job.dxc", tmp_path / "report.json"
    assert await typed("capture", "mnist", "--past", "-o", str(path), "--json", str(report)) == 0
    assert finished(path) == ([*expected(told), forged], "stored"), "what cannot be decoded is kept as it is"
    streams = [one.stream for one in capture.records(path)]
    assert streams == [*(BY_STRUCT[type(message)].carrier for message in told), "REPORTS"]
    header = capture.read_header(path)
    assert (header.job, header.fingerprint) == (examples.JOB, fingerprint())
    said = json.loads(report.read_text())
    assert said["num_windows"] == 3
    assert said["num_file_bytes"] == path.stat().st_size
    assert said["end"]["num_records"] == len(told) + 1
    assert await typed("capture", "mnist", "--past", "-o", str(path)) == 2, "a capture cannot be made again"


async def test_a_capture_made_live_ends_with_the_job_and_agrees_with_one_of_the_past(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_module, "QUIET_S", 0.3)
    told = story(4)
    await publish(bus, told[:12])
    live: list[Record] = []
    source = Source(bus, examples.JOB, past=False, stop=asyncio.Event())
    async with asyncio.timeout(20), contextlib.aclosing(source.batches()) as batches:
        while len(live) < 9:
            live += await anext(batches)
        await publish(bus, told[12:])
        await bus.publish(job("ended"))
        await bus.publish(reward("node-a", (0, 1), 4))  # a straggler behind the end
        async for batch in batches:
            live += batch
    assert source.reason == "ended"
    assert identities(live) == expected([*told, job("ended"), reward("node-a", (0, 1), 4)])
    past = await read(bus, past=True)
    assert past == live[1:]  # of the specifications the broker keeps the newest only


async def test_an_action_waits_for_the_feed_that_came_before_it(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read ACTIONS first, as a slow FEED would have it: the order is that of storing all the same."""
    await publish(bus, told := story(6))
    original = bus.consume

    def in_small_batches(stream: str, subjects: list[str], **options: Any) -> Any:
        return original(stream, subjects, **options, max_batch=2 if stream == "FEED" else 512)

    monkeypatch.setattr(bus, "consume", in_small_batches)
    assert identities(await read(bus, past=True)) == expected(told)


@pytest.mark.usefixtures("address")
async def test_a_signal_finishes_the_file(bus: Bus, tmp_path: Path) -> None:
    await publish(bus, told := story(3))
    path = tmp_path / "job.dxc"
    command = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "dynamix.cli.main", "capture", examples.JOB, "-o", str(path),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(30):
        await command.stderr.readuntil(b"Capturing")
        command.send_signal(signal.SIGINT)  # else it would go on until the job ends
        output, errors = await command.communicate()
    assert command.returncode == 0, errors
    assert b"(interrupted)" in output
    found, reason = finished(path)
    assert (found, reason) == (expected(told)[: len(found)], "interrupted")


async def test_what_was_written_survives_a_kill_while_nothing_comes(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_module, "FLUSH_EVERY_S", 0.05)
    await publish(bus, told := story(1))
    path, stop = tmp_path / "job.dxc", asyncio.Event()
    capturing = asyncio.create_task(command_module.capture(bus, examples.JOB, path, stop))
    async with asyncio.timeout(20):
        while len(beginning(path)) < len(told):  # noqa: ASYNC110 - a growing file sends no event
            await asyncio.sleep(0.02)
        stop.set()
        assert (await capturing)["end"].reason == "interrupted"
    assert identities(beginning(path)) == expected(told)


def beginning(path: Path) -> list[Record]:
    """What can be read of a capture that is being written."""
    found: list[Record] = []
    with contextlib.suppress(FileNotFoundError, CutOffError):
        for one in capture.records(path):
            found.append(one)  # noqa: PERF402 - what came before the cut counts
    return found


def test_a_job_is_found_by_how_its_id_begins_if_that_is_one() -> None:
    def called(name: str, phase: str = "running") -> Job:
        return msgspec.structs.replace(job(phase), job=name)

    jobs = {
        one.job: one for one in (called("a-1", "ended"), called("a-2", "ended"), called("b-1"), called("b-2", "ended"))
    }
    assert chosen(jobs, "a-2").job == "a-2"
    assert chosen(jobs, "b").job == "b-1"  # the one that runs
    assert chosen({"a-1": jobs["a-1"], "c-77": jobs["b-2"]}, "77").job == "b-2"  # by its run id
    with pytest.raises(CommandError, match="'a' may be any of a-2, a-1: name one of them"):
        chosen(jobs, "a")
    with pytest.raises(CommandError, match="no job is called 'c'; jobs on this broker: b-2, b-1, a-2, a-1"):
        chosen(jobs, "c")
