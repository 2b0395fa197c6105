"""Several runs on the same hosts, with the same services."""

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.cluster.display import progress
from bench.cluster.plan import Arm, Plan
from bench.cluster.runner import run_job
from bench.cluster.services import services
from bench.cluster.summary import Result
from bench.hosts import Hosts

Runs = Sequence[tuple[Plan, Arm]]


def run_all(runs: Runs, report: Callable[[Result], None]) -> list[Result]:
    """Run one after the other and report each when it is done; all plans have as many hosts and the same probe.

    Raises:
        HostsError: when there can be no such hosts here, or this user may not make them.
        ClusterError: when a service or a rank fails.
        ValueError: when of a run nothing was seen.
    """
    plan, _ = runs[0]
    with Hosts(plan.num_hosts) as hosts, hosts.entered():
        return asyncio.run(_run_all(hosts, runs, report))


async def _run_all(hosts: Hosts, runs: Runs, report: Callable[[Result], None]) -> list[Result]:
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="dynamix-cluster-") as name:
        directory = Path(name)
        async with services(hosts, runs[0][0].probe, directory) as running:
            for plan, arm in runs:
                watch = progress(plan, arm)
                results.append(await run_job(hosts, running, plan, arm, directory=directory, watch=watch))
                report(results[-1])
    return results
