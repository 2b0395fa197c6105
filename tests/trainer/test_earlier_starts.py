"""What attaching learns from the bus about a job that was there before."""

import asyncio
import contextlib
import logging
from typing import Any

import pytest
import torch
from tests.support import examples
from tests.support.brokers import ConfiguredServer
from tests.support.ranks import run_ranks
from tests.support.training import Numbered, attach_numbered, distribute, make_model, train_step

from dynamix.cli.services import bus_environment
from dynamix.runtime.bus import Bus
from dynamix.runtime.settings import BusSettings
from dynamix.schemas import subjects
from dynamix.schemas.chain import seal
from dynamix.schemas.codec import decode
from dynamix.schemas.messages import Job
from dynamix.trainer import rendezvous as history
from dynamix.trainer.rendezvous import last_generation


async def _asked(settings: BusSettings, job: str = examples.JOB) -> int | None:
    return await asyncio.to_thread(last_generation, settings, job, name="trainer-node-a")


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
        assert last_generation(settings, examples.JOB, name="trainer-node-a") is None
    assert f"cannot ask the bus for earlier starts of {examples.JOB}" in caplog.text
    assert reason in caplog.text


async def test_a_broker_that_never_answers_is_waited_for_a_short_time_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "LOOKUP_S", 0.2)
    hung_up = asyncio.Event()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        hung_up.set()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async with await asyncio.start_server(say_nothing, "127.0.0.1", 0) as silent:
        port = silent.sockets[0].getsockname()[1]
        assert await _asked(BusSettings(url=f"nats://127.0.0.1:{port}")) is None
        await hung_up.wait()


def _start(_rank: int, saved: dict[str, Any] | None) -> dict[str, Any]:
    """One start: attach, load what was saved, take a step, save."""
    model = distribute(make_model(torch.float32))
    session, optimizer = attach_numbered(Numbered(400, torch.float32), model, local_batch_size=32, connect=None)
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
    stored = await bus.last("JOBS", subjects.of("job", "again"))
    assert stored is not None
    assert decode(Job, stored.subject, stored.payload).generation == 2
