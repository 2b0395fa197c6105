"""The training side on a real broker: reports out, actions in, adopted by all ranks at one boundary."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from tests.support import examples
from tests.support.brokers import ConfiguredServer, until
from tests.support.bus_watch import stored_job, stored_messages
from tests.support.control_plane import NODE, ControlPlane, control_plane
from tests.support.loops import gathered, relative_error, whole_gradient
from tests.support.ranks import START, each_case, run_ranks
from tests.support.training import Numbered, begin_job, flat_parameters, gather, train_step
from tests.users.test_shards import LAYOUTS, sharded
from torch import nn

from dynamix.cli.services import ServiceProcess, bus_environment
from dynamix.runtime.bus import Bus, Reader
from dynamix.runtime.settings import BusSettings
from dynamix.schemas import subjects
from dynamix.schemas.chain import seal
from dynamix.schemas.codec import decode, encode
from dynamix.schemas.messages import Action, Applied, Dead, Report
from dynamix.schemas.messages.allocation import Allocation
from dynamix.schemas.streams import FEED, REPORTS
from dynamix.trainer import Session
from dynamix.trainer.bus_client.client import BusClient
from dynamix.trainer.loggers import Metrics

WINDOW_STEPS = 4
TARGET = (3, 21)


def _environ(settings: BusSettings, **more: str) -> dict[str, str]:
    return {**bus_environment(settings), "DYNAMIX_NODE": "node-a", **more}


class Kept:
    """A logger that keeps what it gets."""

    def __init__(self) -> None:
        self.windows: list[tuple[int, Metrics]] = []

    def log(self, metrics: Metrics, *, step: int) -> None:
        self.windows.append((step, metrics))

    def close(self) -> None:
        """Nothing is open."""


def _attach(*loggers: Kept) -> tuple[Session, nn.Module, torch.optim.Optimizer]:
    return begin_job(
        Numbered(500, torch.float32),
        rate=0.01,
        min_local_batch_size=2,
        max_local_batch_size=64,
        name="steered",
        window_steps=WINDOW_STEPS,
        max_lag_windows=1000,
        policy="proportional",
        policy_options={"dead_band": 0.1},
        seed=11,
        loggers=loggers,
        connect=None,
    )


def _step(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    inputs, targets, _ = batch
    outputs = model(inputs)
    loss = nn.functional.cross_entropy(outputs, targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    session.step(loss, (outputs.argmax(1) == targets).sum())


def _train_until_steered(_rank: int) -> dict[str, Any]:
    """Train until the target sizes are active, then three windows more."""
    logger = Kept()
    session, model, optimizer = _attach(logger)
    sizes, last = [], 10**9
    with session:
        session.evaluated(0.25)
        for _ in session.epochs(1000):
            for batch in session.loader:
                sizes.append(session.local_batch_sizes)
                _step(session, model, optimizer, batch)
                if sizes[-1] == TARGET:
                    last = min(last, session.window + 3)
                if len(sizes) % WINDOW_STEPS or session.window < last:
                    continue
                session.close()
                found = {"sizes": sizes, "job": session.job, "samples": session.position}
                return found | {"rows": session.metrics(), "logged": logger.windows}
    raise AssertionError("never steered")


def _action(job: str, window: int, **changes: Any) -> Action:
    fields = {"job": job, "allocation": Allocation(TARGET), "deltas": (0, 0), "policy": "test"}
    return seal(examples.action(window, **fields | changes), b"")


async def _collect(bus: Bus, kind: type[Any], stream: str, subject: str) -> list[Any]:
    """Everything stored on a subject up to now."""
    stored = await stored_messages(bus, stream, subject)
    return [decode(kind, message.subject, message.payload) for message in stored]


async def _arbitrate(bus: Bus) -> None:
    """Answer the first report with what must be refused, later ones with the target."""
    async with bus.consume("REPORTS", [subjects.of("report", "*", "*")], start="all", durable="d") as reports:
        async for batch in reports:
            for message in batch:
                report = decode(Report, message.subject, message.payload)
                subject = subjects.of("action", report.job)
                if report.window == 0:
                    bad = [
                        b"no action",
                        encode(msgspec.structs.replace(_action(report.job, 0), watermark=7)),  # not what was sealed
                        encode(_action(report.job, 0, allocation=Allocation((3, 65)))),
                    ]
                    for number, payload in enumerate(bad):
                        await bus.publish_bytes(subject, payload, f"bad:{number}")
                elif report.window >= 20:  # no window sees both what it refuses and what it adopts
                    action = _action(report.job, report.window)
                    await bus.publish_bytes(subject, encode(action), f"action:{report.window}")


async def test_a_report_goes_out_and_its_action_is_adopted_by_all_ranks_at_one_boundary(
    server: ConfiguredServer, bus: Bus
) -> None:
    arbitrating = asyncio.create_task(_arbitrate(bus))
    results = await asyncio.to_thread(run_ranks, _train_until_steered, 2, environ=_environ(server.settings))
    arbitrating.cancel()
    await asyncio.gather(arbitrating, return_exceptions=True)

    job = results[0]["job"]
    sizes = results[0]["sizes"]
    assert results[1]["sizes"] == sizes
    assert results[1]["samples"] == results[0]["samples"]
    _check_metrics(results[0], results[1])
    changed = sizes.index(TARGET)
    assert sizes == [(8, 8)] * changed + [TARGET] * (len(sizes) - changed)
    assert changed % WINDOW_STEPS == 0

    applied = (await _collect(bus, Applied, "FEED", subjects.of("applied", job)))[0]
    assert applied.local_batch_sizes == TARGET
    assert (applied.effective_step, applied.effective_window) == (changed, changed // WINDOW_STEPS)
    assert applied.decided_window < applied.effective_window
    assert applied.action_hash == _action(job, applied.decided_window).hash
    assert applied.num_refused == {"malformed": 2, "bounds": 1}
    dead = await _collect(bus, Dead, "DEAD", subjects.of("dead", "action", job))
    assert [letter.service for letter in dead] == ["trainer", "trainer"]
    assert dead[0].payload == b"no action"

    reports = await _collect(bus, Report, "REPORTS", subjects.of("report", job, "node-a"))
    assert [report.window for report in reports] == list(range(len(sizes) // WINDOW_STEPS))
    for report in reports:
        _check_report(report, sizes)
    assert reports[-1].samples_seen == results[0]["samples"]
    await _check_job(bus, job)


def _check_metrics(first: dict[str, Any], second: dict[str, Any]) -> None:
    rows = first["rows"]
    assert any(row["decision"] == "refused" and "was refused: " in row["reason"] for row in rows)
    adopted = next(row for row in rows if row["decision"] == "adopted")
    assert adopted["policy"] == "test"
    assert adopted["decided_window"] < adopted["window"]
    assert f"{sum(TARGET)} samples per step on window {adopted['decided_window']}" in adopted["reason"]
    assert [step for step, _ in first["logged"]] == [row["step"] for row in rows]
    assert first["logged"][-1][1]["summary/num_steps"] == rows[-1]["step"]
    assert first["logged"][adopted["window"]][1]["reason"] == adopted["reason"]
    assert second["logged"] == []
    assert [row["window"] for row in second["rows"]] == [row["window"] for row in rows]
    assert not any(name.startswith(("decision", "reason")) for row in second["rows"] for name in row)


def _check_report(report: Report, sizes: list[tuple[int, ...]]) -> None:
    first = report.window * WINDOW_STEPS
    assert report.totals.num_steps == WINDOW_STEPS
    assert report.optimizer_family == "sgd"
    assert report.held_out_accuracy == 0.25
    assert tuple(row.local_batch_size for row in report.rows) == sizes[first]
    assert [row.rank for row in report.rows] == [0, 1]
    assert report.totals.num_correct is not None
    assert report.totals.global_batch_size == sum(sizes[first])
    assert report.totals.noise is not None
    assert (report.totals_before is None) == (report.window == 0)
    for row in report.rows:
        assert row.times_split
        assert row.compute_time_s > 0
        assert row.update_time_s > 0
        assert row.sockets is not None
        assert len(row.cookies) >= 2  # to the other rank: torch's group and ours


async def _check_job(bus: Bus, job: str) -> None:
    specification = await stored_job(bus, job)
    assert (specification.phase, specification.generation, specification.end_reason) == ("ended", 0, "closed")
    assert specification.job.startswith("steered-")
    assert (specification.world_size, specification.window_steps, specification.seed) == (2, WINDOW_STEPS, 11)
    assert specification.initial_local_batch_sizes == (8, 8)
    assert (specification.base_global_batch_size, specification.min_local_batch_size) == (16, 2)
    assert specification.max_local_batch_sizes == (64, 64)
    assert (specification.policy, specification.policy_options) == ("proportional", {"dead_band": 0.1})
    assert specification.total_samples == 500_000
    assert [(node.node, node.ranks) for node in specification.nodes] == [("node-a", (0, 1))]


def _train_through_an_outage(rank: int, trained: Path) -> int:
    """Train ten windows without a broker, then on until everything has left; how many reports were given up."""
    session, model, optimizer = _attach()
    client = session._transport
    with session:
        for _ in session.epochs(100_000):
            for batch in session.loader:
                _step(session, model, optimizer, batch)
                if session.window == 10 and rank == 0:
                    trained.touch()
                time.sleep(0.001)  # leaves the cores to the broker
                emptied = not isinstance(client, BusClient) or len(client.outbox) == 0
                if gather(session.window > 10 and emptied) == [True, True]:
                    return client.num_reports_dropped
    raise AssertionError("the epochs ended first")


async def test_what_was_measured_while_the_broker_was_away_arrives_when_it_is_back(
    server: ConfiguredServer, bus: Bus, tmp_path: Path
) -> None:
    await server.kill()
    environ = _environ(server.settings, DYNAMIX_JOB="outage", DYNAMIX_TRAINER_OUTBOX_MESSAGES="4")
    trained = tmp_path / "trained"
    training = asyncio.create_task(asyncio.to_thread(run_ranks, _train_through_an_outage, 2, trained, environ=environ))
    await until(lambda: trained.exists() or training.done())
    await server.start()
    dropped, nothing = await training
    assert nothing == 0
    assert dropped >= 7  # of the ten windows and the job's specification, four messages were kept

    reports = await _collect(bus, Report, "REPORTS", subjects.of("report", "outage", "node-a"))
    windows = [report.window for report in reports]
    assert windows == sorted(set(windows))
    assert windows[-1] + 1 - len(windows) == dropped
    told = max(report.num_reports_dropped for report in reports)
    assert told in {dropped - 1, dropped}  # a report cannot know what its own arrival pushes out
    assert (await stored_job(bus, "outage")).job == "outage"


# --- without an arbitrator: the agent of a node is killed and comes back ---

OTHER = "node-b"
NODES = (NODE, OTHER)
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


def _train_shards(rank: int, layout: str) -> dict[str, Any]:
    """Train a sharded model until decisions have moved the global batch twice; errors of each step's gradient."""
    os.environ.update({"DYNAMIX_NODE": NODES[rank // 2], "DYNAMIX_JOB": layout.replace(" ", "-")})
    data, sizes, errors = Numbered(20_000), [], []
    options: dict[str, Any] = {"policy": "random", "rate": 0.0, "window_steps": 5, "noise_every": 1, "connect": None}
    session, model, optimizer = begin_job(data, sharded(layout), **options)
    with session:
        for batch in session.loader:
            sizes.append(session.local_batch_sizes)
            used = train_step(session, model, optimizer, batch, lambda _, samples: time.sleep(0.001 * samples))
            found = torch.cat([each.grad.full_tensor().flatten() for each in model.parameters()])
            errors.append(relative_error(found, whole_gradient(data, gathered(used))))
            if len({*map(sum, sizes)}) == 3:
                return {"sizes": sizes, "errors": errors}
    raise AssertionError("never steered")


async def test_shards_adopt_a_decision_at_one_step_and_keep_the_gradient_of_one_big_batch() -> None:
    async with control_plane("arbitrator") as plane:
        _start_agents(plane)
        cases = [(layout,) for layout in LAYOUTS]
        found = await asyncio.to_thread(run_ranks, each_case, 4, _train_shards, cases, environ=plane.environ)
        for layout, (first, *others) in zip(LAYOUTS, zip(*found, strict=True), strict=True):
            applied: list[Any] = await plane.messages(FEED.name, subjects.of("applied", layout.replace(" ", "-")))
            totals = [*map(sum, first["sizes"])]
            moved = {step: size for step, size in enumerate(totals) if step and size != totals[step - 1]}
            assert moved.items() <= {each.effective_step: sum(each.local_batch_sizes) for each in applied}.items()
            assert [each["sizes"] for each in others] == [first["sizes"]] * 3
            assert max(first["errors"]) < 1e-12


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
