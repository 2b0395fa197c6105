"""What the trainer tells the broker and asks it: the bus client's thread, and earlier starts of a job."""

import asyncio
import gc
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from tests.support import examples
from tests.support.brokers import ConfiguredServer, connected, operate, until
from tests.support.bus_watch import stored_job
from tests.support.ranks import run_ranks
from tests.support.training import Numbered, begin_job, train_step
from torch.distributed.elastic.multiprocessing import SignalException

from dynamix.cli.services import bus_environment
from dynamix.runtime.bus import Bus
from dynamix.runtime.bus.provision import provision
from dynamix.runtime.settings import BusSettings
from dynamix.schemas import subjects
from dynamix.schemas.chain import seal
from dynamix.schemas.messages import Message
from dynamix.schemas.streams import REPORTS
from dynamix.trainer import Session
from dynamix.trainer.bus_client import client as client_module
from dynamix.trainer.bus_client.client import BusClient, last_generation
from dynamix.trainer.steering.run import reason_after

NODE = "node-a"


@asynccontextmanager
async def _client(settings: BusSettings, *messages: Message) -> AsyncIterator[BusClient]:
    """A client that has started, with messages in its outbox; it is closed at once."""
    client = BusClient(settings, node=NODE, outbox_messages=16, actions_of=examples.JOB)
    client.start()
    for message in messages:
        client.publish(message)
    yield client
    await asyncio.to_thread(client.close, 0.0)


async def _has_left(client: BusClient) -> None:
    await until(lambda: not client.outbox)


def _users(password: str) -> str:
    return f'users: [{{user: trainer, password: "{password}"}}, {{user: operator, password: "open"}}]'


async def test_a_connection_that_the_broker_closed_for_good_is_made_anew(tmp_path: Path) -> None:
    secret = tmp_path / "password"
    secret.write_text("old")
    async with (
        ConfiguredServer(authorization=_users("old")) as server,
        connected(server.user("operator", "open")) as operator,
    ):
        await provision(operator)
        settings = BusSettings(url=server.settings.url, user="trainer", password_file=str(secret))
        async with _client(settings, examples.job()) as client:
            await _has_left(client)
            server.authorization = _users("new")
            secret.write_text("new")
            server.reload()  # it closes the connections of users whose password changed
            client.publish(examples.report(window=0))
            await _has_left(client)
        assert await operator.last("JOBS", subjects.of("job", examples.JOB)) is not None
        assert await operator.last("REPORTS", subjects.of("report", examples.JOB, NODE)) is not None


async def test_a_refused_password_is_logged_and_stops_nothing(
    server: ConfiguredServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with _client(server.user("dynamix", "wrong"), examples.job()) as client:
        await until(lambda: "cannot connect to the bus" in caplog.text)
    assert len(client.outbox) == 1
    assert "wrong" not in caplog.text


async def test_a_missing_broker_is_said_to_leave_training_alone_and_how_to_start_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with _client(BusSettings(url="nats://127.0.0.1:1")):
        await until(lambda: "waiting for the broker at nats://127.0.0.1:1: " in caplog.text)
    assert "training goes on without steering; start the services with `dynamix up`" in caplog.text


async def test_streams_that_are_made_later_get_what_was_waiting(server: ConfiguredServer) -> None:
    async with _client(server.settings, examples.job(), examples.report(window=0)) as client:
        await until(lambda: "run `dynamix provision`" in client._last_error)
        async with connected(server.settings) as operator:
            await provision(operator)
            await _has_left(client)
            assert await operator.last("JOBS", subjects.of("job", examples.JOB)) is not None
            assert await operator.last("REPORTS", subjects.of("report", examples.JOB, NODE)) is not None


async def test_a_full_stream_is_asked_again_after_a_pause_not_at_once(
    server: ConfiguredServer, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It refuses in less than a millisecond: without the pause our thread would take a processor from the training."""
    publish, tries = Bus.publish, 0

    async def count(self: Bus, message: Any) -> int:
        nonlocal tries
        tries += 1
        return await publish(self, message)

    await provision(bus, [msgspec.structs.replace(REPORTS, max_bytes=100, discard="new")])
    monkeypatch.setattr(Bus, "publish", count)
    monkeypatch.setattr(client_module, "RETRY_S", 60.0)
    async with _client(server.settings, examples.report(window=0)) as client:
        await until(lambda: "maximum bytes exceeded" in client._last_error)
        for _ in range(20):
            await bus.stream_state(REPORTS.name)  # time enough for twenty more tries
        assert tries == 1
        assert len(client.outbox) == 1


@pytest.mark.parametrize("stored", ["nothing", "junk", "far too many starts"])
async def test_a_specification_that_the_broker_lost_is_published_again(
    server: ConfiguredServer, bus: Bus, monkeypatch: pytest.MonkeyPatch, stored: str
) -> None:
    monkeypatch.setattr(client_module, "LOOK_EVERY_S", 0.05)
    ours, subject = examples.job(), subjects.of("job", examples.JOB)
    async with _client(server.settings, ours) as client:
        await _has_left(client)
        if stored == "nothing":
            await operate(bus, "STREAM.PURGE.JOBS")
        elif stored == "junk":
            await bus.publish_bytes(subject, b"junk", "junk")
        else:
            await bus.publish(msgspec.structs.replace(ours, generation=2**53 - 1))
        await until(lambda: client._counters.get("specifications_again"))
    assert await stored_job(bus, examples.JOB) == ours


async def test_the_specification_of_a_later_start_is_left_alone(
    server: ConfiguredServer, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "LOOK_EVERY_S", 0.05)
    looks = 0
    newest = Bus.newest

    async def counted(self: Bus, stream: str, subject: str) -> Any:
        nonlocal looks
        looks += 1
        return await newest(self, stream, subject)

    async with _client(server.settings, examples.job()) as client:
        await _has_left(client)
        await bus.publish(examples.job(generation=1))
        monkeypatch.setattr(Bus, "newest", counted)
        await until(lambda: looks >= 3)
    assert (await stored_job(bus, examples.JOB)).generation == 1


# --- earlier starts ---------------------------------------------------------------------------------------------------


async def _asked(settings: BusSettings, job: str = examples.JOB) -> int | None:
    return await asyncio.to_thread(last_generation, settings, job, node="node-a")


async def test_a_start_that_was_pushed_out_of_its_stream_is_known_by_its_actions(
    server: ConfiguredServer, bus: Bus
) -> None:
    await bus.publish_next(seal(examples.action(5, generation=2), b""), expected_last=0)
    assert await _asked(server.settings) == 2
    await bus.publish(examples.job(generation=1))
    assert await _asked(server.settings) == 2


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (BusSettings(url="nats://127.0.0.1:1"), "cannot connect"),
        (BusSettings(url="nats://192.0.2.1:4222"), "is not this machine"),
    ],
)
def test_without_a_broker_there_is_no_answer_and_no_error(
    settings: BusSettings, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "dynamix.trainer"):
        assert last_generation(settings, examples.JOB, node="node-a") is None
    assert f"cannot ask the bus for earlier starts of {examples.JOB}" in caplog.text
    assert reason in caplog.text


async def test_a_broker_that_never_answers_is_waited_for_a_short_time_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(last_generation.__globals__, "LOOKUP_S", 0.2)
    hung_up = asyncio.Event()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        hung_up.set()
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    async with await asyncio.start_server(say_nothing, "127.0.0.1", 0) as silent:
        port = silent.sockets[0].getsockname()[1]
        assert await _asked(BusSettings(url=f"nats://127.0.0.1:{port}")) is None
        await hung_up.wait()


def _start(_rank: int, saved: dict[str, Any] | None) -> dict[str, Any]:
    """One start: attach, load what was saved, take a step, save."""
    session, model, optimizer = begin_job(Numbered(400, torch.float32), local_batch_size=32, connect=None)
    if saved is not None:
        session.load_state_dict(saved)
    for batch in session.loader:
        train_step(session, model, optimizer, batch)
        break
    state = session.state_dict()
    session.close()
    return {"generation": session.generation, "state": state}


@pytest.mark.slow
async def test_no_generation_of_a_job_is_used_twice_however_it_is_started_again(
    server: ConfiguredServer, bus: Bus
) -> None:
    environ = {
        **bus_environment(server.settings),
        "DYNAMIX_JOB": "again",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_MAX_RESTARTS": "3",
    }

    async def start(launch: str, restarts: int, saved: dict[str, Any] | None = None, **more: str) -> dict[str, Any]:
        log = f"/tmp/{launch}/attempt_{restarts}/0/error.json"
        ranks = {
            **environ,
            "TORCHELASTIC_ERROR_FILE": log,
            "TORCHELASTIC_RESTART_COUNT": str(restarts),
            **more,
        }
        results = await asyncio.to_thread(run_ranks, _start, 2, saved, environ=ranks)
        assert results[0]["generation"] == results[1]["generation"]
        return results[0]

    first = await start("one", 0)
    again = await start("two", 0)  # a second launch under the same id
    restarted = await start("two", 1, again["state"])
    away = {"DYNAMIX_NATS_URL": "nats://127.0.0.1:1", "DYNAMIX_TRAINER_CLOSE_TIMEOUT_S": "0"}
    alone = [await start("three", restarts, restarted["state"], **away) for restarts in (0, 1)]
    generations = [start["generation"] for start in (first, again, restarted, *alone)]
    assert generations == [0, 1, 2, 5, 6]  # launch two has generations 1 ... 4 at most
    assert (await stored_job(bus, "again")).generation == 2


# --- a session that was not closed ---


@pytest.mark.parametrize(
    ("error", "may_restart", "reason"),
    [
        (None, True, "left"),
        (SystemExit(0), True, "left"),
        (SystemExit(3), True, None),
        (ValueError("no such file"), True, None),
        (ValueError("no such file"), False, "ValueError: no such file"),
        (KeyboardInterrupt(), True, "KeyboardInterrupt"),
        (SignalException("process 7 got signal: 15", sigval=15), True, "SignalException: process 7 got signal: 15"),  # type: ignore[arg-type]  # torch passes a number, too
    ],
)
def test_only_an_error_that_a_launcher_answers_is_no_end(
    error: BaseException | None, may_restart: bool, reason: str | None
) -> None:
    assert reason_after(error, may_restart=may_restart) == reason


def _train() -> tuple[Session, Callable[[Any], list[int]]]:
    """A session, and what takes a step of it."""
    session, model, optimizer = begin_job(Numbered(1000, torch.float32), local_batch_size=4, connect=None)
    return session, partial(train_step, session, model, optimizer)


def _leave(_rank: int) -> None:
    session, step = _train()
    for _ in session.epochs(3):
        for batch in session.loader:
            step(batch)
            break
        break
    del session, step, batch
    gc.collect()


async def test_a_session_that_is_let_go_of_ends_its_job(server: ConfiguredServer, bus: Bus) -> None:
    await asyncio.to_thread(run_ranks, _leave, 1, environ=bus_environment(server.settings) | {"DYNAMIX_JOB": "let-go"})
    job = await stored_job(bus, "let-go")
    assert (job.phase, job.end_reason) == ("ended", "left")


@pytest.mark.slow
async def test_a_script_that_somebody_interrupts_ends_its_job_although_restarts_are_left(
    server: ConfiguredServer, bus: Bus, tmp_path: Path
) -> None:
    environ = {
        **os.environ,
        **bus_environment(server.settings),
        "DYNAMIX_JOB": "stopped",
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "TORCHELASTIC_RUN_ID": "run-1",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, str(tmp_path / "store"), env=environ, stderr=asyncio.subprocess.PIPE
    )
    _, shown = await process.communicate()
    assert b"KeyboardInterrupt" in shown
    job = await stored_job(bus, "stopped")
    assert (job.phase, job.end_reason) == ("ended", "KeyboardInterrupt")


def main(store: str) -> None:
    """A script without a `with`, stopped by Ctrl-C in its third step."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    session, step = _train()
    for _ in session.epochs(3):
        for batch in session.loader:
            if session.step_index == 2:
                os.kill(os.getpid(), 2)
            step(batch)


if __name__ == "__main__":
    main(sys.argv[1])
