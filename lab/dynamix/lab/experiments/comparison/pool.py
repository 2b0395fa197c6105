"""Runs tasks in worker processes: one torch thread each, data loaded once per process and workload."""

import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path

import torch

from dynamix.arbitrator.learned.policy import LearnedPolicy
from dynamix.arbitrator.learned.policy_file import PolicyFile
from dynamix.arbitrator.policies.policy import Policy
from dynamix.arbitrator.policies.registry import policy_named
from dynamix.lab.experiments.episodes.episode import run_episode
from dynamix.lab.workloads import Data, workload_named
from dynamix.runtime import worker_process

from .contenders import Setting
from .runs import RunOutcome, RunTask

Work = Callable[[RunTask], RunOutcome]


class RunFailedError(RuntimeError):
    """An episode raised, or a worker died; the text names the run."""


def outcomes(tasks: Iterable[RunTask], *, jobs: int, data: Path | None = None) -> Iterator[tuple[RunTask, RunOutcome]]:
    """Run tasks and yield each with its outcome as it comes; with one job in this process, in order.

    Closing the iterator, or an interrupt, ends the workers at once.

    Raises:
        RunFailedError: when an episode raises; the cause is chained.
    """
    work = partial(run_task, data=data)
    if jobs == 1:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            for task in tasks:
                yield task, _named(task, partial(work, task))
        finally:
            torch.set_num_threads(threads)
        return
    yield from parallel_outcomes(list(tasks), work, jobs)


def run_task(task: RunTask, *, data: Path | None = None) -> RunOutcome:
    """Run one episode in this process."""
    setting = task.setting
    began_s = time.perf_counter()
    episode = run_episode(
        task.ruling_scenario,
        policy_of(setting),
        data=_data(task.scenario.workload, data),
        seed=task.seed,
        policy_options=setting.options,
        initial_local_batch_size=task.initial_local_batch_size,
    )
    return RunOutcome(
        time_to_target_s=episode.time_to_target_s,
        accuracy_at_fixed_time=episode.accuracy_at_fixed_time,
        test_accuracy=episode.test_accuracy,
        num_steps=episode.num_steps,
        num_windows=episode.num_windows,
        samples_seen=episode.samples_seen,
        virtual_time_s=episode.virtual_time_s,
        evaluations=[(evaluation.time_s, evaluation.accuracy) for evaluation in episode.evaluations],
        wall_s=time.perf_counter() - began_s,
    )


def policy_of(setting: Setting) -> Policy:
    """The policy of a setting: from its file when it has one."""
    return _learned(setting.policy_file) if setting.policy_file else policy_named(setting.policy)


def parallel_outcomes(tasks: Sequence[RunTask], work: Work, jobs: int) -> Iterator[tuple[RunTask, RunOutcome]]:
    """Run in processes; at most two tasks per worker are handed out, so that an end comes soon."""
    others = {child.pid for child in multiprocessing.active_children()}
    context = multiprocessing.get_context("spawn")  # torch has threads by now: a fork would inherit their locks
    executor = ProcessPoolExecutor(jobs, context, initializer=_start_worker, initargs=(os.getpid(),))
    waiting = iter(tasks)
    running: dict[Future[RunOutcome], RunTask] = {}
    try:
        while True:
            for task in islice(waiting, 2 * jobs - len(running)):
                running[executor.submit(work, task)] = task
            if not running:
                return
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                task = running.pop(future)
                yield task, _named(task, future.result)
    finally:
        executor.shutdown(wait=not running, cancel_futures=True)
        if running:
            _end_workers(others)


def _end_workers(others: set[int | None]) -> None:
    for child in multiprocessing.active_children():
        if child.pid not in others:
            child.terminate()
            child.join()


def _start_worker(parent: int) -> None:
    """Leave interrupts to the parent, die with it, and compute on one thread."""
    worker_process.begin(parent)
    torch.set_num_threads(1)


def _named(task: RunTask, result: Callable[[], RunOutcome]) -> RunOutcome:
    try:
        return result()
    except Exception as error:
        where = f"{task.setting.policy} in scenario {task.scenario.name}, seed {task.seed}"
        raise RunFailedError(f"{where}: {type(error).__name__}: {error}") from error


@lru_cache(maxsize=2)
def _data(workload: str, directory: Path | None) -> Data:
    return workload_named(workload).load(directory)


@lru_cache(maxsize=64)
def _learned(file: str) -> Policy:
    return LearnedPolicy(PolicyFile.read(Path(file)))
