"""Real ranks on two nodes under the policy `stigmergy`: the collector of one node is killed, and comes back."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from multiprocessing.synchronize import Event
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tests.support.control_plane import NODE, ControlPlane, control_plane
from tests.support.ranks import START, run_ranks
from tests.support.training import Numbered, begin_job, flat_parameters, train_step

from dynamix.cli.services import ServiceProcess
from dynamix.runtime.bus import Reader
from dynamix.schemas import subjects
from dynamix.schemas.codec import decode
from dynamix.schemas.messages import Report
from dynamix.schemas.streams import REPORTS

OTHER = "node-b"
NODES = (NODE, OTHER)
WINDOW_STEPS = 4
FAST_S, SLOW_S = 0.001, 0.004
"""Seconds per sample."""
TIMEOUT_S = 40.0


class WholeWindow(NamedTuple):
    """What both nodes reported of a window."""

    sizes: tuple[int, ...]
    has_trace: bool
    """Whether the field holds a trace of the other node."""


def _train(rank: int, slowed: Event, enough: Event) -> dict[str, Any]:
    """Train until `enough` is set; rank 3 is slow, and ranks 1 and 2 when `slowed` is set."""
    os.environ["DYNAMIX_NODE"] = NODES[rank // 2]
    options: dict[str, Any] = {"policy": "stigmergy", "local_batch_size": 16, "min_local_batch_size": 1, "rate": 0.01}
    options |= {"window_steps": WINDOW_STEPS, "global_batch": "fixed", "name": "dying", "seed": 11, "connect": None}
    session, model, optimizer = begin_job(Numbered(4000, torch.float32), **options)

    def wait(_step: int, samples: int) -> None:
        time.sleep(samples * (SLOW_S if rank == 3 or (rank > 0 and slowed.is_set()) else FAST_S))

    is_over = torch.zeros(1)
    with session:
        for _ in session.epochs(1000):
            for batch in session.loader:
                train_step(session, model, optimizer, batch, wait)
                if session.step_index % WINDOW_STEPS == 0:
                    is_over.fill_(float(enough.is_set()))
                    dist.broadcast(is_over, src=0)
                    if is_over:
                        return {"sizes": session.local_batch_sizes, "parameters": flat_parameters(model).tolist()}
    raise AssertionError("the epochs ended first")


async def _whole_windows(consumer: Reader) -> AsyncIterator[WholeWindow]:
    by_window: dict[int, dict[str, Report]] = {}
    async for batch in consumer:
        for message in batch:
            report = decode(Report, message.subject, message.payload)
            nodes = by_window.setdefault(report.window, {})
            nodes[report.node] = report
            if len(nodes) == len(NODES):
                view = nodes[OTHER].field
                yield WholeWindow(
                    sizes=tuple(row.local_batch_size for node in NODES for row in nodes[node].rows),
                    has_trace=view is not None and view.own is not None,
                )


async def _until(windows: AsyncIterator[WholeWindow], reached: Callable[[WholeWindow], bool]) -> list[WholeWindow]:
    """The windows up to the first one for which `reached` holds."""
    seen: list[WholeWindow] = []
    async with asyncio.timeout(TIMEOUT_S):
        async for window in windows:
            seen.append(window)
            if reached(window):
                return seen
    raise AssertionError("the consumer ended")


def _start_agents(plane: ControlPlane) -> dict[str, ServiceProcess]:
    """The collectors of both nodes, which end with the control plane."""
    environs = {node: {"DYNAMIX_NODE": node, "DYNAMIX_INSTANCE": node} for node in NODES}
    agents = {node: plane.another("collector", environ) for node, environ in environs.items()}
    plane.services.update(agents)
    for agent in agents.values():
        agent.start()
    return agents


async def test_ranks_of_a_killed_agent_keep_their_share_until_it_is_back_while_the_others_go_on() -> None:
    slowed, enough = START.Event(), START.Event()
    reports = subjects.of("report", subjects.ANY, subjects.ANY)
    async with control_plane() as plane, plane.bus.consume(REPORTS.name, [reports], start="all") as consumer:
        agents, windows = _start_agents(plane), _whole_windows(consumer)
        environ = {**plane.environ, "DYNAMIX_JOB": "dying"}
        training = asyncio.create_task(asyncio.to_thread(run_ranks, _train, 4, slowed, enough, environ=environ))
        try:
            await _until(windows, lambda window: window.has_trace and window.sizes[2] > 2 * window.sizes[3])
            agents[OTHER].kill()
            faded = (await _until(windows, lambda window: not window.has_trace))[-1]
            slowed.set()
            alone = await _until(windows, lambda window: window.sizes[0] > 2 * window.sizes[1])
            agents[OTHER].start()
            back = await _until(windows, lambda window: window.has_trace and window.sizes[0] > 2 * window.sizes[2])
        finally:
            enough.set()
            ended = await training
    assert {window.sizes[2:] for window in alone} == {faded.sizes[2:]}  # though rank 2 is four times slower by then
    assert not any(window.has_trace for window in alone)
    assert back[-1].sizes[2] < faded.sizes[2]
    assert {sum(window.sizes) for window in [faded, *alone, *back]} == {64}
    assert all(one == ended[0] for one in ended)
