"""An episode: one virtual job under one policy, joined by the very functions that the services call, without a bus."""

import importlib.metadata
import itertools
import os
import platform
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import BrokenExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import joblib
import msgspec
import numpy as np
import torch

from dynamix.arbitrator.deciding.fold import Fold
from dynamix.arbitrator.policies.policy import Policy
from dynamix.arbitrator.policies.rule import Rule
from dynamix.collector.agent import trace_of
from dynamix.collector.window import simulated_window
from dynamix.lab.workloads import Data, workload_named
from dynamix.recording.fingerprint import DECIDING_PACKAGES, source_digest
from dynamix.runtime.die_with_parent import begin_worker
from dynamix.schemas.codec import encode
from dynamix.schemas.features import state_of
from dynamix.schemas.messages import Action, Applied, Job, JobProfile, Report
from dynamix.schemas.messages.allocation import Explored

from .cluster import Evaluation, VirtualCluster
from .scenario import Scenario

EPISODE_PACKAGES = (*DECIDING_PACKAGES, "dynamix.trainer", "dynamix.lab.simulator", "dynamix.lab.workloads")
"""Packages whose code an episode runs through."""


def code_digest() -> str:
    """SHA-256 over the sources that an episode runs through; results with different digests are never mixed."""
    return source_digest(EPISODE_PACKAGES)


@lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    """Versions that numbers may depend on."""
    return {
        "dynamix": importlib.metadata.version("dynamix-batch"),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "numpy": np.__version__,
    }


Result = TypeVar("Result")


class EpisodeError(RuntimeError):
    """An episode raised, or its worker died; the message names the episode and the reason."""


def run_episodes(work: Callable[[Any], Result], tasks: Sequence[Any], *, jobs: int) -> Generator[tuple[int, Result]]:
    """Run tasks with joblib and yield the index of each with its result, as they complete.

    `jobs` processes on this machine, or this process for 1; inside of `joblib.parallel_config(backend=...)` the workers
    of that backend, such as Dask or Ray on a cluster. Results are the same everywhere. At most two tasks per worker are
    handed out, so that an interrupt ends soon. A task has a `name` for messages.

    Raises:
        EpisodeError: when a task raises, or a worker process dies.
    """
    threads = torch.get_num_threads()
    parallel = joblib.Parallel(
        n_jobs=jobs, return_as="generator_unordered", pre_dispatch="2*n_jobs", batch_size=1, max_nbytes=None
    )
    found = parallel(joblib.delayed(_run)(work, index, task, os.getpid()) for index, task in enumerate(tasks))
    try:
        for pair in found:  # noqa: UP028 - `yield from` would close it before its warning is silenced
            yield pair
    except BrokenExecutor as error:
        raise EpisodeError(f"a worker process died, for example for want of memory: {error}") from error
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of results that an interrupt leaves unused
            found.close()
        torch.set_num_threads(threads)


def run_in_order(work: Callable[[Any], Result], tasks: Sequence[Any], *, jobs: int) -> list[Result]:
    """The results of `run_episodes` in the order of the tasks."""
    return [result for _, result in sorted(run_episodes(work, tasks, jobs=jobs), key=lambda pair: pair[0])]


def _run(work: Callable[[Any], Result], index: int, task: Any, parent: int) -> tuple[int, Result]:
    if os.getppid() == parent:  # a process of ours: interrupts are its parent's, as is its end
        begin_worker(parent)
    torch.set_num_threads(1)
    try:
        return index, work(task)
    except Exception as error:
        raise EpisodeError(f"{task.name}: {type(error).__name__}: {error}") from error


@lru_cache(maxsize=2)
def workload_data(workload: str, directory: Path | None) -> Data:
    """The data of a workload, loaded once per process; raises as `Workload.load`."""
    return workload_named(workload).load(directory)


GRID_TOLERANCE_S = 1e-9
"""Points of the grid are multiples of a float: the last one may lie a rounding error behind a time."""


class RunOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a run; times in virtual seconds."""

    time_to_target_s: float | None
    """First time on the grid at which the validation accuracy was at the target; `None` is a miss."""
    accuracy_at_fixed_time: float | None
    """`None` when the grid has no point before the fixed time."""
    test_accuracy: float
    num_steps: int
    num_windows: int
    samples_seen: int
    virtual_time_s: float
    evaluations: list[Evaluation] = []
    wall_s: float = 0.0
    """Wall-clock duration, for the forecast; never part of a result."""


class Episode(RunOutcome, frozen=True, kw_only=True):
    """Result of one virtual job."""

    scenario: Scenario
    job: Job
    actions: list[Action]
    applied: list[Applied]
    profile: JobProfile | None = None
    """The family's profile after the run; `None` in a job without a family, or where nothing was learned."""


def run_episode(
    scenario: Scenario,
    policy: Policy,
    *,
    data: Data,
    seed: int,
    policy_options: Mapping[str, float | str] | None = None,
    initial_local_batch_size: int | None = None,
    job: str | None = None,
    on_window: Callable[[list[Report]], None] | None = None,
    make_cluster: type[VirtualCluster] = VirtualCluster,
    family: str = "",
    profile: JobProfile | None = None,
    explores: tuple[Explored, ...] = (),
) -> Episode:
    """Run a job to its end; data, options and initial size are as `VirtualCluster` takes them.

    The seed determines weights, data order and disturbances: equal seeds make policies comparable in pairs. Policies
    that sample draw by the name of the job, by default of scenario and seed. `on_window` is called with the reports of
    each window. A job of a family begins with the `profile` of an earlier episode, if it is given one, and leaves one;
    it may try out what it `explores`.

    Raises:
        ValueError: when the scenario names what is not known.
    """
    cluster = make_cluster(
        scenario,
        data,
        seed=seed,
        policy=policy.name,
        policy_options=policy_options,
        initial_local_batch_size=initial_local_batch_size,
        job=job,
        family=family,
        explores=explores,
    )
    fold: Fold | None = None
    actions: list[Action] = []
    sequence = itertools.count(1)
    while reports := cluster.run_window():
        if fold is None:  # the job is known once its ranks have timed their first steps
            fold = Fold(cluster.job, policy, None, b"" if profile is None else encode(profile))
        if on_window is not None:
            on_window(reports)
        for report in reports:
            fold.add_state(next(sequence), state_of(simulated_window(report)))
        while (action := fold.close()) is not None:
            fold.adopt(action)
            cluster.offer(action)
            actions.append(action)
        for trace in filter(None, (trace_of(report) for report in reports)):
            cluster.leave_trace(trace)
    after = None
    if family and actions and isinstance(policy, Rule):
        after = policy.profile_after(cluster.job, actions[-1], profile)
    fixed_time_s = cluster.scenario.fixed_time_s + GRID_TOLERANCE_S
    until = [evaluation.accuracy for evaluation in cluster.evaluations if evaluation.time_s <= fixed_time_s]
    return Episode(
        time_to_target_s=cluster.time_to_target_s,
        accuracy_at_fixed_time=until[-1] if until else None,
        test_accuracy=cluster.test_accuracy(),
        num_steps=cluster.position.step,
        num_windows=cluster.window,
        samples_seen=cluster.position.samples_seen,
        virtual_time_s=cluster.time_s,
        evaluations=cluster.evaluations,
        scenario=cluster.scenario,
        job=cluster.job,
        actions=actions,
        applied=cluster.applied,
        profile=after,
    )
