"""What reading costs the collector: a socket, and the window of a node."""

import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

from bench.kernel.endpoints import Endpoints
from bench.kernel.groups import Groups
from bench.kernel.traffic import Workload

from dynamix.collector.ebpf.probe import SocketProbe
from dynamix.collector.ebpf.traffic import SocketTraffic
from dynamix.schemas.messages import JobTotals, RankRow, Report

NUM_RANKS = 8
SOCKETS_PER_RANK = (3, 127)
"""A small ring or tree, and a mesh of 128 ranks."""


def of_probe(ends: Endpoints, groups: Groups, num_repeats: int) -> dict[str, Any]:
    """Medians, with sockets that are open and known; both ends of each connection are somebody's."""
    num_pairs = NUM_RANKS * max(SOCKETS_PER_RANK) // 2
    held = Workload("held open", "stream", num_pairs, 1, "socket", 0)
    with SocketProbe(groups.busy) as probe:
        cookies = ends.open(held)
        try:
            return {
                "socket_us": 1e6 * _per_socket_s(probe, cookies, num_repeats),
                "windows": [_window(probe, cookies, number, num_repeats) for number in SOCKETS_PER_RANK],
            }
        finally:
            ends.close()


def _per_socket_s(probe: SocketProbe, cookies: Sequence[int], num_repeats: int) -> float:
    """Median over rounds of the mean."""
    uid, taken_s = os.getuid(), []
    for _ in range(num_repeats):
        start_s = time.perf_counter()
        for cookie in cookies:
            probe.read(cookie, uid)
        taken_s.append((time.perf_counter() - start_s) / len(cookies))
    return statistics.median(taken_s)


def _window(probe: SocketProbe, cookies: Sequence[int], num_sockets: int, num_repeats: int) -> dict[str, Any]:
    traffic, taken_s = SocketTraffic(probe), []
    batches = [tuple(cookies[rank * num_sockets :][:num_sockets]) for rank in range(NUM_RANKS)]
    for window in range(num_repeats + 1):
        report = _report(window, batches)
        start_s = time.perf_counter()
        found = traffic.window(report)
        taken_s.append(time.perf_counter() - start_s)
        if window and isinstance(found, str):
            raise RuntimeError(f"the probe does not know the sockets of the benchmark: {found}")
    return {
        "num_ranks": NUM_RANKS,
        "sockets_per_rank": num_sockets,
        "window_us": 1e6 * statistics.median(taken_s[1:]),
    }


def _report(window: int, cookies: Sequence[tuple[int, ...]]) -> Report:
    """A node's report that names these sockets; what is not read of it is made up."""
    rows = tuple(
        RankRow(
            rank=rank,
            local_rank=rank,
            pid=1,
            pid_start_ticks=0,
            pid_namespace=0,
            uid=os.getuid(),
            local_batch_size=32,
            pending_local_batch_size=32,
            num_samples=32,
            loss_sum=1.0,
            num_correct=1.0,
            data_time_s=0.0,
            compute_time_s=0.0,
            sync_time_s=0.0,
            update_time_s=0.0,
            cookies=named,
        )
        for rank, named in enumerate(cookies)
    )
    totals = JobTotals(
        window=window,
        num_steps=1,
        num_samples=32 * len(rows),
        global_batch_size=32 * len(rows),
        loss_sum=1.0,
        num_correct=1.0,
        time_s=1.0,
    )
    return Report(
        job="bench",
        generation=0,
        window=window,
        node="bench",
        optimizer_family="sgd",
        first_step=window,
        epoch=0,
        samples_seen=0,
        rows=rows,
        totals=totals,
    )
