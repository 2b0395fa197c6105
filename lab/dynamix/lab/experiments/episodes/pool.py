"""Worker processes that run episodes: one torch thread each, none left when the parent is gone."""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Protocol, Self, TypeVar

import torch

from dynamix.lab.workloads import Data, workload_named
from dynamix.runtime.die_with_parent import begin_worker


class NamedTask(Protocol):
    """What a pool runs: a picklable task with a name for messages."""

    @property
    def name(self) -> str:
        """Scenario and seed, for example."""


Task = TypeVar("Task", bound=NamedTask)
Result = TypeVar("Result")


class EpisodeError(RuntimeError):
    """An episode raised, or its worker died; the text names the episode and says why."""


class EpisodePool(ExitStack):
    """Runs tasks in worker processes, or in this process when it has one worker; results are the same."""

    def __init__(self, num_workers: int) -> None:
        super().__init__()
        self._num_workers = num_workers
        self._executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        if self._num_workers == 1:
            self.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(1)
        else:
            self._executor = self.enter_context(_worker_processes(self._num_workers))
        return super().__enter__()

    def run(self, work: Callable[[Task], Result], tasks: Sequence[Task]) -> Iterator[tuple[int, Result]]:
        """Run tasks and yield the index of each with its result, as they complete.

        At most two tasks per worker are handed out, so that an interrupt ends soon.

        Raises:
            EpisodeError: when a task raises; the cause is chained.
        """
        if self._executor is None:
            for index, task in enumerate(tasks):
                yield index, _named(task, partial(work, task))
            return
        waiting, running = iter(enumerate(tasks)), dict[Future[Result], int]()
        while True:
            for index, task in islice(waiting, 2 * self._num_workers - len(running)):
                running[self._executor.submit(work, task)] = index
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                index = running.pop(future)
                yield index, _named(tasks[index], future.result)

    def run_all(self, work: Callable[[Task], Result], tasks: Sequence[Task]) -> list[Result]:
        """Run tasks and return their results in the order of the tasks; raises as `run`."""
        return [result for _, result in sorted(self.run(work, tasks), key=lambda pair: pair[0])]


@lru_cache(maxsize=2)
def workload_data(workload: str, directory: Path | None) -> Data:
    """The data of a workload, loaded once per process; raises as `Workload.load`."""
    return workload_named(workload).load(directory)


@contextmanager
def _worker_processes(num_workers: int) -> Iterator[ProcessPoolExecutor]:
    """An executor whose workers finish their tasks at the end, and are terminated at once after an exception."""
    others = {child.pid for child in multiprocessing.active_children()}
    context = multiprocessing.get_context("spawn")  # torch has threads by now: a fork would inherit their locks
    executor = ProcessPoolExecutor(num_workers, context, initializer=_start_worker, initargs=(os.getpid(),))
    try:
        yield executor
    except BaseException:
        for child in multiprocessing.active_children():
            if child.pid not in others:
                child.terminate()
        executor.shutdown(cancel_futures=True)  # its thread joins them; a second join beside it can miss the end
        raise
    executor.shutdown()


def _start_worker(parent: int) -> None:
    begin_worker(parent)
    torch.set_num_threads(1)


def _named(task: NamedTask, result: Callable[[], Result]) -> Result:
    try:
        return result()
    except Exception as error:
        raise EpisodeError(f"{task.name}: {type(error).__name__}: {error}") from error
