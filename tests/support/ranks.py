"""Real ranks for tests: processes that meet over gloo, forked from this one, which has imported torch already.

A fresh interpreter needs ten seconds of processor time for what DDP imports; a fork needs milliseconds.
"""

import gc
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, thread
from contextlib import nullcontext
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._dynamo  # what every DDP model would import
import torch.distributed as dist
from bench.hosts import Host, Namespace

TIMEOUT_S = 240.0
START = multiprocessing.get_context("forkserver" if torch.cuda.is_available() else "fork")  # CUDA survives no fork


class _RankStart(NamedTuple):
    rank: int
    world_size: int
    directory: Path
    store: str
    environ: Mapping[str, str]
    network: Namespace | None


class RankError(AssertionError):
    """A rank failed; the text holds its traceback."""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    environ: Mapping[str, str] | None = None,
    store: str = "file",
    hosts: Sequence[Host] = (),
) -> list[Any]:
    """Run `function(rank, *args)` in `world_size` processes of one gloo group; returns what they returned.

    `store` is "file", or "tcp" for a TCPStore on a free port; `hosts` are where the ranks live, here when there are
    none.

    Raises:
        RankError: when a rank raised or did not end in time.
    """
    with tempfile.TemporaryDirectory() as directory:
        settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0" if hosts else "lo", **(environ or {})}
        ends, processes = [], []
        for rank in range(world_size):
            ours, theirs = START.Pipe(duplex=False)
            network = hosts[rank].namespace if hosts else None
            start = _RankStart(rank, world_size, Path(directory), store, settings, network)
            process = START.Process(target=_rank_main, args=(theirs, function, start, args))
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


def _rank_main(end: Connection, function: Callable[..., Any], start: _RankStart, args: tuple[Any, ...]) -> None:
    gc.freeze()  # a collection that walks through all of torch copies every page of it
    thread._threads_queues.clear()  # the threads of pools were not forked: the end must not wait for them
    warnings.resetwarnings()
    os.environ.update(start.environ)
    multiprocessing.set_start_method("fork", force=True)  # workers of loaders as a script has them: forked, with torch
    torch.set_num_threads(1)
    try:
        with start.network.entered() if start.network else nullcontext():
            _join(start)
            _send(end, ok=True, value=function(start.rank, *args))
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 - the parent shows it
        _send(end, ok=False, value=traceback.format_exc())
    finally:
        end.close()


def _send(end: Connection, *, ok: bool, value: Any) -> None:
    """Send by value: torch would leave tensors in the memory of a process that is about to end."""
    end.send_bytes(pickle.dumps((ok, value)))


def _join(start: _RankStart) -> None:
    if start.store == "tcp":
        store = _tcp_store(start.directory / "port", start.rank, start.world_size)
        dist.init_process_group("gloo", store=store, rank=start.rank, world_size=start.world_size)
        return
    rendezvous = f"file://{start.directory}/store"
    dist.init_process_group("gloo", init_method=rendezvous, rank=start.rank, world_size=start.world_size)


def _tcp_store(port_file: Path, rank: int, world_size: int) -> dist.TCPStore:
    """Rank 0's store listens on a port that the kernel chose; the others read it from a file."""
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
        draft = port_file.with_suffix(".draft")
        draft.write_text(str(store.port))
        draft.rename(port_file)
        return store
    while not port_file.exists():
        time.sleep(0.005)
    return dist.TCPStore("127.0.0.1", int(port_file.read_text()), world_size, is_master=False)
