"""Gradient servers: real processes that sum for real ranks, as `dynamix serve-gradients` does."""

import contextlib
import os
import select
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import START, TIMEOUT_S, RankError, run_ranks, wait_for_file
from tests.support.training import flat_parameters
from tests.support.whole_numbers import train_step, train_until, whole_job

from dynamix.cli.main import main
from dynamix.schemas.messages.allocation import EXACT, Exchange
from dynamix.trainer.exchange.servers import GradientServer
from dynamix.trainer.job.options import VARIABLE, served_exchange

SERVERS = "servers"


class Server(NamedTuple):
    """A server process, and what it says."""

    process: Any
    said: Connection
    address: str

    def read_line(self) -> str:
        """The next line that it says."""
        assert self.said.poll(TIMEOUT_S)
        line: str = self.said.recv()
        return line


def _serve(said: Connection) -> None:
    """What the command does, in a process that has imported torch already."""
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    server = GradientServer(0, said.send)
    said.send(server.port)
    server.run(stop)


@contextlib.contextmanager
def running_server() -> Iterator[Server]:
    """A server of its own on a free port."""
    ours, theirs = START.Pipe(duplex=False)
    process = START.Process(target=_serve, args=(theirs,))
    process.start()
    theirs.close()
    try:
        assert ours.poll(TIMEOUT_S)
        yield Server(process, ours, f"127.0.0.1:{ours.recv()}")
    finally:
        process.kill()
        process.join()
        ours.close()


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Server]]:
    """Two that serve one job after the other."""
    with running_server() as first, running_server() as second:
        yield [first, second]


def over(servers: list[Server]) -> dict[str, str]:
    """The environment of a job over these."""
    return {VARIABLE: ",".join(server.address for server in servers)}


def _trained(_rank: int, exchange: Exchange | None) -> dict[str, Any]:
    """Parameters after some steps, and how gradients travelled."""
    num_ranks = dist.get_world_size()
    options: dict[str, Any] = {"local_batch_size": 4, "base_global_batch_size": 4 * num_ranks**2}  # weights of 1
    options |= {} if exchange is None else {"exchange": exchange}
    with whole_job(**options) as (session, model, optimizer):
        train_until(12, session, model, optimizer)
        session.average()
        return {"parameters": flat_parameters(model), "exchange": session.allocation.exchange}


def test_servers_sum_whole_numbers_bit_for_bit_one_job_after_the_other(servers: list[Server]) -> None:
    exact = run_ranks(_trained, 3, None)[0]
    assert exact["exchange"] == EXACT
    assert 0 < exact["parameters"].abs().max() < 100
    for chosen, exchange in (
        (servers, None),
        (servers[1:], Exchange(route=SERVERS, codec="rows")),
        (servers, Exchange(route=SERVERS, shares=(0.0, 1.0, 1.0, 0.0, 3.0))),
        (servers, Exchange(every=3, route=SERVERS)),
    ):
        for found in run_ranks(_trained, 3, exchange, environ=over(chosen)):
            assert found["exchange"] == (exchange or Exchange(route=SERVERS))
            assert torch.equal(found["parameters"], exact["parameters"])


# --- what goes wrong -----------------------------------------------------------------------------------------------


def _until_broken(rank: int, ready: Path, killed: int | None) -> None:
    """Train for as long as the servers are there; a rank may be killed."""
    with whole_job(local_batch_size=4) as (session, model, optimizer):
        for _ in session.epochs(10_000):
            for batch in session.loader:
                if session.step_index == 5:
                    ready.touch()
                    if rank == killed:
                        os.kill(os.getpid(), signal.SIGKILL)
                train_step(session, model, optimizer, batch)


def _kill_when(path: Path, server: Server) -> None:
    wait_for_file(path)
    server.process.kill()


def test_a_server_that_is_killed_ends_the_job_with_an_error(servers: list[Server], tmp_path: Path) -> None:
    with running_server() as mortal, ThreadPoolExecutor(1) as pool:
        pool.submit(_kill_when, tmp_path / "ready", mortal)
        with pytest.raises(RankError) as caught:
            run_ranks(_until_broken, 2, tmp_path / "ready", None, environ=over([servers[0], mortal]))
    for rank in (0, 1):
        assert f"rank {rank}: Traceback" in str(caught.value)
    assert "the exchange between the ranks failed" in str(caught.value)


def _outlives(rank: int, server: int) -> list[str]:
    """Rank 0 kills the server behind the last step; what threads die of when the session ends."""
    died: list[str] = []
    threading.excepthook = lambda raised: died.append(str(raised.exc_value))
    with whole_job(local_batch_size=4) as (session, model, optimizer):
        train_step(session, model, optimizer, next(iter(session.loader)))
        dist.barrier()
        if rank == 0:
            handle = os.pidfd_open(server)
            os.kill(server, signal.SIGKILL)
            select.select([handle], [], [])
            os.close(handle)
        dist.barrier()
    return died


def test_a_server_that_is_killed_behind_the_last_step_is_not_missed() -> None:
    with running_server() as mortal:
        assert run_ranks(_outlives, 2, mortal.process.pid, environ=over([mortal])) == [[], []]


def test_a_server_whose_job_dies_serves_the_next_one(tmp_path: Path) -> None:
    with running_server() as server:
        with pytest.raises(RankError, match="rank 1: ended without a result"):
            run_ranks(_until_broken, 3, tmp_path / "ready", 1, environ=over([server]))
        assert server.read_line().endswith(": 3 ranks, server 0 of 1")
        assert ": ended early: " in server.read_line()
        exact = run_ranks(_trained, 2, None)[0]["parameters"]
        for found in run_ranks(_trained, 2, None, environ=over([server])):
            assert torch.equal(found["parameters"], exact)
        assert server.read_line().endswith(": 2 ranks, server 0 of 1")
        assert server.read_line().endswith(": ended")
        server.process.terminate()
        server.process.join(20)
        assert server.process.exitcode == 0


def test_a_server_that_is_not_there_is_named_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamix.trainer.exchange.servers.REACH_S", 0.2)
    with pytest.raises(RankError) as caught:
        run_ranks(_trained, 2, None, environ={VARIABLE: "127.0.0.1:9"})
    assert str(caught.value).count("RuntimeError: the gradient servers 127.0.0.1:9 cannot all be reached") == 2
    assert "start `dynamix serve-gradients` at each address" in str(caught.value)


def test_what_servers_cannot_do_is_refused() -> None:
    served = Exchange(route=SERVERS)
    assert served_exchange("exact", "") == ("exact", ())
    assert served_exchange("exact", "a:1, b:2") == (served, ("a:1", "b:2"))
    for exchange, named, why in (
        (served, "", "needs gradient servers: start `dynamix serve-gradients` and name the addresses in DYNAMIX_TR"),
        ("lossy", "a:1", "exchange='lossy' and gradient servers exclude each other, since no decision uses them"),
        (Exchange(codec="rows"), "a:1", "exchange=rows over all-reduce and gradient servers exclude each other"),
        (
            Exchange(codec="int8", route=SERVERS),
            "a:1",
            "servers keep no residuals; use one of the codecs",
        ),
        ("exact", "a", "gradient server 'a': write HOST:PORT"),
        ("exact", "a:1,a:1", "each server once"),
    ):
        with pytest.raises(ValueError, match=why.replace("(", "\\(")):
            served_exchange(exchange, named)  # type: ignore[arg-type]


def test_the_command_says_what_it_cannot_do(capsys: pytest.CaptureFixture[str]) -> None:
    taken = socket.create_server(("", 0))
    with taken:
        port = taken.getsockname()[1]
        assert main(["serve-gradients", "--port", str(port)]) == 1
    assert f"dynamix serve-gradients: cannot listen on port {port}: " in capsys.readouterr().err
