"""Worker processes that play episodes: one torch thread each, gone when the parent is gone."""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

import torch

from dynamix.runtime import worker_process

from .episodes import EpisodeResult, EpisodeTask, play

Play = Callable[[Sequence[EpisodeTask]], list[EpisodeResult]]


class EpisodeError(RuntimeError):
    """An episode that could not be played; the text names it and says why."""


@contextmanager
def players(num_workers: int) -> Iterator[Play]:
    """A function that plays tasks and returns what came of them, in their order.

    With one worker they are played in this process. Results do not depend on the number of workers.
    """
    if num_workers == 1:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield lambda tasks: [_played(task, lambda task=task: play(task)) for task in tasks]  # type: ignore[misc]
        finally:
            torch.set_num_threads(threads)
        return
    context = multiprocessing.get_context("spawn")  # torch has threads by now: a fork would inherit their locks
    with ProcessPoolExecutor(num_workers, context, initializer=_start, initargs=(os.getpid(),)) as executor:

        def play_all(tasks: Sequence[EpisodeTask]) -> list[EpisodeResult]:
            futures = [executor.submit(play, task) for task in tasks]
            try:
                return [_played(task, future.result) for task, future in zip(tasks, futures, strict=True)]
            except BaseException:
                executor.shutdown(wait=False, cancel_futures=True)
                raise

        yield play_all


def _played(task: EpisodeTask, result: Callable[[], EpisodeResult]) -> EpisodeResult:
    try:
        return result()
    except Exception as error:
        raise EpisodeError(f"{task.name}: {type(error).__name__}: {error}") from error


def _start(parent: int) -> None:
    worker_process.begin(parent)
    torch.set_num_threads(1)
