"""Real ranks for tests: processes that meet over gloo, forked from this one, which has imported torch already.

A fresh interpreter needs six seconds of processor time for what DDP imports; a fork needs milliseconds.
"""

import contextlib
import gc
import multiprocessing
import os
import pickle
import stat
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, thread
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # what every DDP model would import
import torch.distributed as dist
from bench.hosts import Host, Namespace

from .http_get import free_port

TIMEOUT_S = 240.0
START = multiprocessing.get_context("forkserver" if torch.cuda.is_available() else "fork")  # CUDA survives no fork


class RankError(AssertionError):
    """A rank failed; the text holds its traceback."""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    environ: Mapping[str, str] | None = None,
    store: str = "file",
    hosts: Sequence[Host] = (),
    timeout: timedelta | None = None,
) -> list[Any]:
    """Run `function(rank, *args)` in `world_size` processes of one gloo group; returns what they returned.

    They meet in a file, or over a TCP `store`; `hosts` are where the ranks live, here when there are none; `timeout` is
    the group's.

    Raises:
        RankError: when a rank raised or did not end in time.
    """
    with tempfile.TemporaryDirectory() as directory:
        settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0" if hosts else "lo", **(environ or {})}
        meeting = f"tcp://127.0.0.1:{free_port()}" if store == "tcp" else f"file://{directory}/store"
        ends, processes = [], []
        for rank in range(world_size):
            ours, theirs = START.Pipe(duplex=False)
            group = {"init_method": meeting, "world_size": world_size, "rank": rank, "timeout": timeout}
            network = hosts[rank].namespace if hosts else None
            call = partial(function, rank, *args)
            process = START.Process(target=_rank_main, args=(theirs, settings, network, group, call))
            process.start()
            theirs.close()
            ends.append(ours)
            processes.append(process)
        try:
            with ThreadPoolExecutor(world_size) as pool:
                outcomes = list(pool.map(_receive, ends, processes))
        finally:
            for process in processes:
                process.join(5)
                if process.is_alive():
                    process.kill()
                    process.join()
                process.close()
            for end in ends:
                end.close()
    failures = [f"rank {rank}: {text}" for rank, (ok, text) in enumerate(outcomes) if not ok]
    if failures:
        raise RankError("\n".join(failures))
    return [value for _, value in outcomes]


def each_case(rank: int, function: Callable[..., Any], cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Results of `function(rank, *case)` for one case after the other, to be run in the same ranks."""
    return [function(rank, *case) for case in cases]


def _receive(end: Connection, process: BaseProcess) -> tuple[bool, Any]:
    if not end.poll(TIMEOUT_S):
        return False, f"no result within {TIMEOUT_S:g} s"
    try:
        outcome: tuple[bool, Any] = pickle.loads(end.recv_bytes())
    except EOFError:
        return False, "ended without a result"
    if not outcome[0]:
        process.join(2)
        process.kill()  # gloo may keep a failed rank, and with it the others, until the time-out of the group
    return outcome


def _rank_main(
    end: Connection,
    environ: Mapping[str, str],
    network: Namespace | None,
    group: dict[str, Any],
    call: Callable[[], Any],
) -> None:
    begin_fork(environ)
    try:
        with network.entered() if network else contextlib.nullcontext():
            dist.init_process_group("gloo", **group)
            _send(end, ok=True, value=call())
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 - the parent shows it
        _send(end, ok=False, value=traceback.format_exc())
    finally:
        end.close()


def wait_for_file(path: Path) -> None:
    """Wait until another process has made a file."""
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.01)


def begin_fork(environ: Mapping[str, str]) -> None:
    """Leave behind what belongs to the process that this one is a fork of."""
    gc.freeze()  # a collection that walks through all of torch copies every page of it
    thread._threads_queues.clear()  # the threads of pools were not forked: the end must not wait for them
    for descriptor in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        with contextlib.suppress(OSError):  # the one that has listed them is closed
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                os.dup2(2, descriptor, inheritable=False)  # an object that knows the number may still close it
    warnings.resetwarnings()
    os.environ.update(environ)
    multiprocessing.set_start_method("fork", force=True)  # workers of loaders as a script has them: forked, with torch
    torch.set_num_threads(1)


def _send(end: Connection, *, ok: bool, value: Any) -> None:
    """Send by value: torch would leave tensors in the memory of a process that is about to end."""
    end.send_bytes(pickle.dumps((ok, value)))
