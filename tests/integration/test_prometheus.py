"""A real Prometheus scrapes the services of a running job, reads all rules, raises an alert and clears it."""

import asyncio
import time
from pathlib import Path

import pytest
import torch
from tests.support import examples
from tests.support.control_plane import NODE, control_plane, feed_windows, one_node_job
from tests.support.http_get import free_port
from tests.support.prometheus import Prometheus, eventually, grafana_queries, needs, prometheus
from tests.support.ranks import run_ranks
from tests.support.training import Numbered, begin_job, gather

from dynamix.cli.services import SERVICES, bus_environment
from dynamix.schemas import subjects

pytestmark = [needs("prometheus"), pytest.mark.slow, pytest.mark.timeout(600)]


def train_until(_rank: int, end: Path) -> str:
    """A script of a user, until a file exists; the job's name."""
    data = Numbered(480, torch.float32)
    classes = data.inputs[:, :4].argmax(1)  # can be learned: else there is no gradient to compare the noise with
    data.tensors = (data.inputs, classes, data.tensors[2])
    sizes = {"local_batch_size": 8, "min_local_batch_size": 2, "max_local_batch_size": 64}
    session, model, optimizer = begin_job(data, rate=0.01, window_steps=4, policy="proportional", connect=None, **sizes)
    with session:
        for epoch in session.epochs(100_000):
            session.evaluated(0.5 + 0.4 * epoch / (1 + epoch))
            for inputs, targets, _ in session.loader:
                outputs = model(inputs)
                loss = torch.nn.functional.cross_entropy(outputs, targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                session.step(loss, num_correct=int((outputs.argmax(1) == targets).sum()))
                time.sleep(0.01)  # leaves the cores to the services
                if any(gather(end.exists())):
                    return session.job
    raise AssertionError("nothing ended it")


async def test_a_job_that_trains_answers_every_query_and_a_dead_service_raises_an_alert_until_it_is_back(
    tmp_path: Path,
) -> None:
    """Two ranks train, those of another job refused an action, an alert is raised; the probe's cost needs eBPF."""
    ports, end = {name: free_port() for name in SERVICES}, tmp_path / "end"
    async with control_plane() as plane, prometheus(tmp_path, ports) as server:
        plane.environ["DYNAMIX_COLLECTOR_PROBE"] = "auto"
        for name, port in ports.items():
            await plane.start(name, DYNAMIX_METRICS_PORT=str(port))
        environ = {**bus_environment(plane.server.settings), "DYNAMIX_NODE": NODE}
        training = asyncio.create_task(asyncio.to_thread(run_ranks, train_until, 2, end, environ=environ))
        try:
            await eventually(lambda: server.values("dynamix_job_window > 5"))
            await plane.bus.publish_bytes(subjects.of("state", "junk", NODE), b"no message", "junk")
            (job,) = await server.ask("label/training_job/values")
            other = one_node_job()
            await plane.bus.publish(other)
            await feed_windows(plane, other, range(3))
            decided = f'dynamix_job_decided_window{{training_job="{other.job}"}}'
            await eventually(lambda: server.values(f"{decided} == 2"))
            await plane.bus.publish(examples.applied(0, 2, job=other.job, num_refused={"stale": 1}))
            await answers_all(server, grafana_queries(f"({job}|{other.job})"))
            down = 'count(ALERTS{alertname="DynamixServiceDown",alertstate="firing"})'
            assert await server.values(down) == []
            plane.services["reward"].kill()
            await eventually(lambda: server.values(f"{down} == 1"))
            await plane.start("reward", DYNAMIX_METRICS_PORT=str(ports["reward"]))
            await eventually(lambda: has_no_value(server, down))
            rules = [rule for group in (await server.ask("rules"))["groups"] for rule in group["rules"]]
            assert [rule["name"] for rule in rules if rule["health"] != "ok"] == []
        finally:
            end.touch()
            assert set(await training) == {job}


async def has_no_value(server: Prometheus, query: str) -> bool:
    return await server.values(query) == []


async def answers_all(server: Prometheus, queries: list[str]) -> None:
    """Wait until no query has an empty answer."""
    missing = queries
    for _ in range(240):
        has_probe = await server.values("dynamix_ebpf") == [1.0]
        missing = [
            query
            for query in queries
            if not await server.values(query) and (has_probe or query != "dynamix:probe_cost:ratio")
        ]
        if not missing:
            return
        await asyncio.sleep(0.5)
    raise AssertionError(f"no answer to {missing}")
