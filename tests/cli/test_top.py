"""`dynamix top` on a real broker: messages of the real services, the right job, one frame, one snapshot."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest
from tests.support import examples
from tests.support.control_plane import NODE, ControlPlane, control_plane, one_node_job, report_of
from tests.support.examples import applied, event

from dynamix.cli.board.feed import Feed
from dynamix.cli.jobs import newest_job
from dynamix.cli.main import main
from dynamix.cli.services import SERVICES, bus_environment
from dynamix.runtime.bus import Bus
from dynamix.runtime.bus.provision import provision
from dynamix.runtime.embedded import EmbeddedServer
from dynamix.schemas.messages import Job

SPEEDS = (1000.0, 1000.0, 1000.0, 300.0)


@pytest.fixture
async def bus() -> AsyncIterator[Bus]:
    """A broker with streams and no clients."""
    async with EmbeddedServer() as server:
        connection = await Bus.connect(server.settings, name="test")
        await provision(connection)
        yield connection
        await connection.close()


def job_called(name: str, phase: str = "running") -> Job:
    return msgspec.structs.replace(examples.job(), job=name, phase=phase)


async def until(feed: Feed, holds: Callable[[], bool]) -> None:
    """Wait until something holds of a feed that is being followed."""
    async with asyncio.timeout(20):
        while not holds():
            feed.changed.clear()
            await feed.changed.wait()


async def test_what_real_services_say_of_a_job_is_on_the_board() -> None:
    async with control_plane(*SERVICES) as plane:
        job = one_node_job()
        await plane.bus.publish(job)
        for window in range(3):
            await plane.bus.publish(report_of(job, window, job.initial_local_batch_sizes, SPEEDS))
        await plane.wait_for_actions(3)
        await plane.bus.publish(applied(0, 2))
        await plane.bus.publish(event(2))

        following = Feed(plane.bus, None)
        task = asyncio.create_task(following.follow())
        await until(
            following, lambda: following.board is not None and following.board.window == 2 and _is_whole(following)
        )
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        at_once = Feed(plane.bus, job.job)
        await at_once.catch_up()
        shown, snapshot = await asyncio.gather(_command(plane, "--once"), _command(plane, "--json", "-"))

    for feed in (following, at_once):
        board = feed.board
        assert board is not None
        assert board.local_batch_sizes == (128, 128, 128, 128)
        assert board.action is not None
        assert board.action.window == 2
        assert board.action.local_batch_sizes[3] < 128
        assert board.applied is not None
        assert board.event is not None
        assert {row.node for row in board.ranks.values()} == {NODE}
        assert len(board.curve("throughput")) == 3
        assert next(iter(board.reward_terms())) == "accuracy"
        assert {beat.live.service for beat in feed.heartbeats.recent(_now(feed))} == set(SERVICES)
    assert "window 2 · 4 ranks" in shown
    assert "signature size-stuck" in shown
    assert f"● collector {NODE}" in shown
    data = json.loads(snapshot)
    assert data["job"]["name"] == job.job
    assert [rank["training"]["local_batch_size"] for rank in data["job"]["ranks"]] == [128] * 4
    assert data["job"]["specification"]["policy"] == "proportional"
    assert "carry" not in data["job"]["action"]
    assert data["job"]["event"]["signature"] == "size-stuck"
    assert data["services_missing"] == []


def _is_whole(feed: Feed) -> bool:
    board = feed.board
    assert board is not None
    rewards = [row.reward for row in board.ranks.values()]
    heard = {beat.live.service for beat in feed.heartbeats.recent(_now(feed))}
    return None not in rewards and None not in (board.applied, board.action, board.event) and heard == set(SERVICES)


def _now(feed: Feed) -> float:
    """A time at which everything heard so far counts."""
    return max((beat.heard_s for beat in feed.heartbeats.recent(0.0)), default=0.0)


async def _command(plane: ControlPlane, *arguments: str) -> str:
    environ = {**os.environ, **bus_environment(plane.server.settings), "COLUMNS": "120"}
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "dynamix.cli.main", "top", *arguments], env=environ, stdout=subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    return output.decode()


async def test_it_turns_to_a_job_that_starts_and_not_to_one_that_ends(bus: Bus) -> None:
    feed = Feed(bus, None)
    following = asyncio.create_task(feed.follow())
    for name in ("first-00000001", "second-00000002"):
        await bus.publish(job_called(name))
        await until(feed, lambda name=name: feed.board is not None and feed.board.name == name)
    await bus.publish(job_called("first-00000001", "ended"))
    window = examples.window(job="second-00000002")
    await bus.publish(window)
    await until(feed, lambda: feed.board is not None and feed.board.window == 0)
    assert feed.board is not None
    assert feed.board.name == "second-00000002"
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


async def test_a_named_job_is_waited_for_and_kept(bus: Bus) -> None:
    feed = Feed(bus, "mine")
    following = asyncio.create_task(feed.follow())
    await bus.publish(job_called("other-00000001"))
    await bus.publish(job_called("mine-00000002"))
    await until(feed, lambda: feed.board is not None)
    assert feed.board is not None
    assert feed.board.name == "mine-00000002"
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


async def test_a_job_that_is_not_there_is_answered_with_those_that_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dynamix.cli.board.feed.HEARTBEAT_WAIT_S", 0.1)
    async with EmbeddedServer() as server:
        for name, value in bus_environment(server.settings).items():
            monkeypatch.setenv(name, value)
        connection = await Bus.connect(server.settings, name="test")
        await provision(connection)
        await connection.publish(job_called("first-00000001", "ended"))
        await connection.publish(job_called("second-00000002"))
        await connection.close()
        assert await asyncio.to_thread(main, ["top", "nosuch", "--once"]) == 1
    output = capsys.readouterr()
    assert "no job is called 'nosuch'; jobs on this broker: second-00000002, first-00000001" in output.err
    assert output.out == ""


async def test_an_empty_broker_gives_an_empty_board(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamix.cli.board.feed.HEARTBEAT_WAIT_S", 0.1)
    feed = Feed(bus, None)
    await feed.catch_up()
    assert feed.board is None


async def test_a_broker_without_streams_says_what_to_run() -> None:
    async with EmbeddedServer() as server:
        environ = {**os.environ, **bus_environment(server.settings)}
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, "-m", "dynamix.cli.main", "top", "--once"], env=environ, stderr=subprocess.PIPE
        )
        _, errors = await process.communicate()
    assert process.returncode == 1
    assert "run `dynamix provision`" in errors.decode()
    assert "Traceback" not in errors.decode()


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (None, "b-00000002"),
        ("a-00000001", "a-00000001"),
        ("a", "a-00000004"),
        ("c", "c-00000003"),
        ("00000003", "c-00000003"),
        ("a-0000", None),
        ("missing", None),
    ],
)
def test_the_job_shown_is_the_one_meant(wanted: str | None, expected: str | None) -> None:
    jobs = {
        "a-00000001": job_called("a-00000001", "ended"),
        "b-00000002": job_called("b-00000002"),
        "c-00000003": job_called("c-00000003", "ended"),
        "a-00000004": job_called("a-00000004", "ended"),
    }
    assert newest_job(jobs, wanted) == expected


def test_without_a_broker_it_says_where_it_looked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DYNAMIX_NATS_URL", "nats://127.0.0.1:1")
    monkeypatch.setattr("dynamix.cli.connection.CONNECT_TIMEOUT_S", 0.2)
    assert main(["top", "--once"]) == 1
    assert "no broker at nats://127.0.0.1:1" in capsys.readouterr().err
