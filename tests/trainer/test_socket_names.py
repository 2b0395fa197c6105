"""How the sockets between ranks are named in reports: by the kernel's cookies, so that a probe finds the same ones."""

import itertools
import os
import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.support.ranks import run_ranks
from tests.support.sockets import cookie
from tests.support.training import Numbered, begin_job, train_step

from dynamix.schemas.messages import Message, Report
from dynamix.schemas.messages.allocation import MAX_SOCKETS
from dynamix.trainer.measurement.sockets import MAX_NODE_SOCKETS, Connection, Endpoint, PeerSockets


def test_more_sockets_than_a_report_can_name_are_not_named_in_part() -> None:
    def matched(num_sockets: int, num_ranks: int) -> PeerSockets:
        ends = [(Endpoint("10.0.0.1", port), Endpoint("10.0.0.2", port)) for port in range(num_sockets)]
        ours = [Connection(*both, cookie) for cookie, both in enumerate(ends, 1)]
        theirs = [Connection(*reversed(both), cookie) for cookie, both in enumerate(ends, num_sockets + 1)]
        sockets = PeerSockets()
        sockets.match([*[ours] * num_ranks, theirs], 0, range(num_ranks))
        return sockets

    assert len(matched(MAX_SOCKETS, 10).cookies[9]) == MAX_SOCKETS  # 40,960 in all
    assert matched(MAX_SOCKETS + 1, 1).cookies == {}
    assert matched(MAX_NODE_SOCKETS // 16, 17).cookies == {}


def _tcp_sockets(store_port: int) -> set[int]:
    """Cookie of every TCP connection of this process but the store's, by Python's own sockets."""
    found = set()
    for entry in list(Path("/proc/self/fd").iterdir()):
        try:
            copy = socket.socket(fileno=os.dup(int(entry.name)))
        except OSError:  # closed since, or no socket
            continue
        with copy:
            if copy.family not in {socket.AF_INET, socket.AF_INET6} or copy.type != socket.SOCK_STREAM:
                continue
            try:
                ports = copy.getsockname()[1], copy.getpeername()[1]
            except OSError:  # it listens
                continue
            if store_port not in ports:
                found.add(cookie(copy))
    return found


def _store_port() -> int:
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    assert isinstance(store, dist.TCPStore)  # type: ignore[attr-defined]
    return int(store.port)


def _train_and_report(rank: int) -> dict[str, Any]:
    """Three windows of two steps on two nodes; groups of the user's come and go around them."""
    os.environ["DYNAMIX_NODE"] = "node-b" if rank == 2 else "node-a"
    port = _store_port()
    passing = dist.new_group()
    session, model, optimizer = begin_job(Numbered(400, torch.float32), min_local_batch_size=8, window_steps=2)
    reports: list[Message] = []
    session._transport.publish = reports.append  # type: ignore[method-assign]
    attached = _tcp_sockets(port)
    dist.barrier()  # all have looked

    dist.destroy_process_group(passing)
    del passing  # the last reference closes its sockets
    closed = attached - _tcp_sockets(port)
    dist.new_group()  # is there at the end of the first window
    matched = _tcp_sockets(port)
    for batch in itertools.islice(session.loader, 7):
        if session.step_index == 4:
            dist.new_group()  # comes after the ranks told each other
        train_step(session, model, optimizer, batch)
    session.close()
    return {
        "attached": attached,
        "closed": closed,
        "joined": matched - attached,
        "unnamed": _tcp_sockets(port) - matched,
        "named": session._meter.sockets.cookies,
        "reports": [report for report in reports if isinstance(report, Report)],
    }


def test_reports_name_exactly_the_sockets_between_ranks() -> None:
    results = run_ranks(_train_and_report, 3, store="tcp")
    for rank, result in enumerate(results):
        # a socket to each of the others for every group: torch's own, ours, and the one that passes
        assert len(result["attached"]) == 6
        assert len(result["closed"]) == len(result["joined"]) == len(result["unnamed"]) == 2
        first = tuple(sorted(result["attached"]))
        later = tuple(sorted(result["joined"] | result["attached"]))
        reporter = results[0 if rank < 2 else 2]
        named = [row.cookies for report in reporter["reports"] for row in report.rows if row.rank == rank]
        assert named == [first, later, later]
    every = [cookie for result in results for cookie in (*result["attached"], *result["joined"])]
    assert len(set(every)) == len(every) == 24
    assert [row.rank for row in results[0]["reports"][0].rows] == [0, 1]
    assert results[1]["reports"] == []
    assert set(results[1]["named"]) == {0, 1}
    assert set(results[2]["named"]) == {2}
