"""One virtual job and its results: decided in this process, or by the services on the bus."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from dynamix.cli.connection import connected, find
from dynamix.cli.errors import explained
from dynamix.cli.output import Document
from dynamix.cli.services import ServiceProcess, bus_environment, hear
from dynamix.lab.comparison.rows import ORACLE, Row, Tuned, parse_rows
from dynamix.lab.comparison.runs import policy_of
from dynamix.lab.simulator.cluster import VirtualCluster
from dynamix.lab.simulator.episode import Episode, episode_of, run_episode
from dynamix.lab.simulator.lockstep import NoActionError, run_lockstep
from dynamix.lab.simulator.scenario import SUITES, Scenario, scenario_root
from dynamix.lab.workloads import Data, workload_named
from dynamix.runtime.bus import Bus
from dynamix.runtime.settings import BusSettings
from dynamix.schemas.messages import Report
from dynamix.schemas.subjects import MAX_NAME, new_run_id

COLLECTORS_READY_S = 60.0
MAX_SHOWN = 64
"""Characters of a wrong name that an error repeats."""


class SimulationPlan(NamedTuple):
    """A scenario, a policy and a seed."""

    scenario: Scenario
    setting: Row
    label: str
    """The policy as it was spelled."""
    seed: int


class SimulatedWindow(msgspec.Struct, frozen=True, kw_only=True):
    """One window."""

    window: int
    time_s: float
    """Virtual time at its end."""
    step_time_s: float
    local_batch_sizes: list[int]
    """Local batch sizes of its last step."""
    global_batch_size: int
    loss: float | None
    accuracy: float | None
    """Share of the training samples classified correctly."""
    held_out_accuracy: float | None


class Simulation(NamedTuple):
    """Result of a virtual job; times are virtual."""

    policy: str
    """The name that was given, with its options."""
    seed: int
    episode: Episode
    windows: list[SimulatedWindow]

    def document(self) -> Document:
        """All of it, for JSON."""
        scenario, episode = self.episode.scenario, self.episode
        return {
            "scenario": scenario.name,
            "workload": scenario.workload,
            "policy": self.policy,
            "seed": self.seed,
            "job": episode.job.job,
            "world_size": scenario.world_size,
            "target_accuracy": scenario.target_accuracy,
            "fixed_time_s": scenario.fixed_time_s,
            "time_to_target_s": episode.time_to_target_s,
            "accuracy_at_fixed_time": episode.accuracy_at_fixed_time,
            "test_accuracy": episode.test_accuracy,
            "virtual_time_s": episode.virtual_time_s,
            "num_windows": episode.num_windows,
            "num_steps": episode.num_steps,
            "samples_seen": episode.samples_seen,
            "num_applied": len(episode.applied),
            "evaluations": [point._asdict() for point in episode.evaluations],
            "windows": self.windows,
        }


OnWindow = Callable[[SimulatedWindow], None]
OnReports = Callable[[Sequence[Report]], None]


def plan(scenario: str, policy: str, policy_file: str | None, *, seed: int) -> SimulationPlan:
    """The requested simulation. Raises ValueError when the scenario or the policy cannot be used."""
    found = scenario_named(scenario)
    files = {policy.partition(":")[0]: [policy_file]} if policy_file else None
    row, *others = parse_rows(policy, files)
    if others:
        raise ValueError(f"--policy {policy!r}: name one policy, NAME[:KEY=VALUE,...]")
    if row.policy == ORACLE:
        raise ValueError(f"{ORACLE!r} stands for several runs: use `dynamix evaluate --policies {ORACLE}`")
    settings = row.settings(found.family, Tuned())  # as it was typed: nothing tuned
    if not settings:
        raise ValueError(f"no file of the policy {row.policy!r} is shipped: name one with --policy-file")
    return SimulationPlan(found, settings[0], policy, seed)


def scenario_named(text: str) -> Scenario:
    """A scenario from a file, or one that comes with the package: `train/mixed-8`, or `mixed-8` in either part.

    Raises ValueError when there is none, with those there are.
    """
    if os.path.isfile(text):  # noqa: PTH113 - False where `Path.is_file` raises: for a name that is too long
        return Scenario.read(text)
    root = scenario_root()
    shipped = {f"{part}/{file.stem}": file for part in SUITES for file in sorted((root / part).glob("*.toml"))}
    fitting = [name for name, file in shipped.items() if text in {name, file.stem}]
    if len(fitting) > 1:
        raise ValueError(f"scenario {text!r} could be {' or '.join(fitting)}: name one of them")
    if not fitting:
        known = ", ".join(shipped)
        raise ValueError(f"scenario {text[:MAX_SHOWN]!r} is neither a file nor among those that are shipped: {known}")
    return Scenario.read(shipped[fitting[0]])


def simulate(planned: SimulationPlan, data: Path | None, *, on_window: OnWindow, bus: bool) -> Simulation:
    """Run the job to its end.

    Raises:
        CommandError: when the bus or its services do not do their part.
        ValueError: when the data set or the initial size cannot be used.
        OSError: when the data set is missing.
    """
    torch.set_num_threads(1)  # this process is the command's own; a virtual worker's batch is too small for two
    loaded = workload_named(planned.scenario.workload).load(data)
    windows: list[SimulatedWindow] = []

    def record(reports: Sequence[Report]) -> None:
        windows.append(_window(reports, windows[-1].time_s if windows else 0.0))
        on_window(windows[-1])

    episode = asyncio.run(_on_bus(planned, loaded, record)) if bus else _in_process(planned, loaded, record)
    return Simulation(planned.label, planned.seed, episode, windows)


def _window(reports: Sequence[Report], started_s: float) -> SimulatedWindow:
    totals = reports[0].totals
    samples = max(totals.num_samples, 1)
    sizes = {row.rank: row.local_batch_size for report in reports for row in report.rows}
    return SimulatedWindow(
        window=totals.window,
        time_s=started_s + totals.time_s,
        step_time_s=totals.time_s / totals.num_steps,
        local_batch_sizes=[sizes[rank] for rank in sorted(sizes)],
        global_batch_size=totals.global_batch_size,
        loss=None if totals.loss_sum is None else totals.loss_sum / samples,
        accuracy=None if totals.num_correct is None else totals.num_correct / samples,
        held_out_accuracy=reports[0].held_out_accuracy,
    )


def _in_process(planned: SimulationPlan, data: Data, record: OnReports) -> Episode:
    setting = planned.setting
    return run_episode(
        planned.scenario,
        policy_of(setting),
        data=data,
        seed=planned.seed,
        policy_options=setting.options,
        initial_local_batch_size=setting.local_batch_size,
        on_window=record,
    )


async def _on_bus(planned: SimulationPlan, data: Data, record: OnReports) -> Episode:
    setting, settings = planned.setting, find(os.environ)
    cluster = VirtualCluster(
        planned.scenario,
        data,
        seed=planned.seed,
        policy=setting.policy,
        policy_options=setting.options,
        initial_local_batch_size=setting.local_batch_size,
        job=f"{planned.scenario.name[:MAX_NAME]}-{new_run_id()}",
    )
    async with connected(settings, "simulate") as bus, _collectors(bus, settings, cluster):
        with explained(NoActionError):
            actions = await run_lockstep(cluster, bus, on_window=record)
    return episode_of(cluster, actions)


@contextlib.asynccontextmanager
async def _collectors(bus: Bus, settings: BusSettings, cluster: VirtualCluster) -> AsyncIterator[None]:
    """Run a collector for each virtual node: that of this machine serves its own node only."""
    names = [f"{cluster.job.job}-{number}"[-63:].lstrip("-") for number in range(len(cluster.job.nodes))]
    services = []
    for name, node in zip(names, cluster.job.nodes, strict=True):
        place = {"DYNAMIX_NODE": node.node, "DYNAMIX_INSTANCE": name, "DYNAMIX_LOG_LEVEL": "warning"}
        services.append(ServiceProcess("collector", bus_environment(settings) | place))
    try:
        for service in services:
            service.start()
        with contextlib.suppress(TimeoutError):  # without them there is no action, which `run_lockstep` reports
            async with asyncio.timeout(COLLECTORS_READY_S):
                await asyncio.gather(*(hear(bus, lambda _: True, "collector", name) for name in names))
        yield
    finally:
        for service in services:
            service.stop()
