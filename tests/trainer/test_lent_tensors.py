"""No thread of a process group enters the interpreter because of us, and groups end when they are no longer needed."""

import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # what a DDP model would import, in every pair
import torch.distributed as dist
from tests.support import rows
from tests.support.ranks import run_ranks
from tests.support.training import Numbered, begin_job, make_model, offer, train_step
from torch.nn.parallel import DistributedDataParallel

from dynamix.trainer import Session
from dynamix.trainer.measurement.meter import ROWS
from dynamix.trainer.steering.collectives import Collectives

ROOT = Path(__file__).parents[2]

_api = ctypes.pythonapi
_api.PyInterpreterState_Get.restype = ctypes.c_void_p
_api.PyThreadState_New.restype = ctypes.c_void_p
_api.PyThreadState_New.argtypes = [ctypes.c_void_p]
_api.PyThreadState_GetID.restype = ctypes.c_uint64
for _function in (_api.PyThreadState_GetID, _api.PyThreadState_Clear, _api.PyThreadState_Delete):
    _function.argtypes = [ctypes.c_void_p]


def _next_state() -> int:
    """The number of a thread state made for this: they count up, one for each entry of a thread that C++ started."""
    state = _api.PyThreadState_New(_api.PyInterpreterState_Get())
    number = int(_api.PyThreadState_GetID(state))
    _api.PyThreadState_Clear(state)
    _api.PyThreadState_Delete(state)
    return number


def _train_steered(group: dist.ProcessGroup, *, split: Any, closes: bool) -> None:
    """Sixty steps of DDP on a group of its own, each with a row, a decision and several buckets."""
    model = DistributedDataParallel(make_model(), process_group=group, bucket_cap_mb=0.001)
    session, _, optimizer = begin_job(
        Numbered(960), model, min_local_batch_size=1, window_steps=1, policy=None, global_batch="fixed"
    )
    for batch in session.loader:
        offer(session, [(8, 8), (6, 10)][session.step_index % 2], split=split)
        train_step(session, model, optimizer, batch)
    if closes:
        session.close()


def _entries(rank: int, how: str) -> tuple[int, bool]:
    """How often gloo's threads entered the interpreter until they ended, and whether their group did."""
    del rank
    group = dist.new_group(backend="gloo")
    first = _next_state()
    _train_steered(group, split="tracking" if how == "tracking" else "fixed", closes=how != "left")
    alive = weakref.ref(group)
    dist.destroy_process_group(group)
    del group  # the last one: its threads are joined
    return _next_state() - first - 1, alive() is None


@pytest.mark.parametrize("how", ["fixed", "tracking", "left"])
def test_no_thread_of_a_process_group_enters_the_interpreter(how: str) -> None:
    assert run_ranks(_entries, 2, how) == [(0, True)] * 2


def _close_under_way(rank: int) -> float:
    """Rank 0 closes while its row waits for rank 1's; returns how long that took, or what rank 1 received."""
    collectives = Collectives()
    row = rows.row(num_samples=rank + 1)
    found = 0.0
    if rank == 0:
        collectives.post_row(row)
        began = time.monotonic()
        collectives.close()
        found = time.monotonic() - began
        del collectives
    dist.barrier()
    if rank == 1:
        collectives.post_row(row)
        found = collectives.take_rows(ROWS)[0].rank.num_samples
    dist.barrier()
    return found


def test_closing_waits_for_no_other_rank() -> None:
    """After an error it may never come; what is under way goes on."""
    took_s, received = run_ranks(_close_under_way, 2)
    assert took_s < 10  # gloo itself would wait for half an hour
    assert received == 1.0


DEFAULT_GROUP = """
import weakref
from dynamix import trainer
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
import torch._dynamo  # as the first DDP model does
alive = weakref.ref(dist.group.WORLD)
dist.destroy_process_group()
print(alive() is None)
"""


@pytest.mark.slow
def test_destroying_the_default_group_ends_it() -> None:
    assert _python("-c", DEFAULT_GROUP).split() == ["True"]


def _python(*arguments: str) -> str:
    environ = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], env=environ, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- ranks that end as a script does, through the interpreter's own end: this file as a program ---

NUM_RANKS = 2
NUM_STEPS = 4


def closes(session: Session) -> None:
    """Close the session, then end as the examples do."""
    session.close()
    dist.destroy_process_group()


def destroys(_session: Session) -> None:
    """End as the examples do."""
    dist.destroy_process_group()


def leaves(_session: Session) -> None:
    """Nothing is closed or destroyed."""


def fails(_session: Session) -> None:
    """An error that is not caught."""
    raise RuntimeError("the script's own")


ENDS: dict[str, Callable[[Session], None]] = {end.__name__: end for end in (closes, destroys, leaves, fails)}


def train(end: Callable[[Session], None]) -> None:
    """A few steps; `end` follows right after the last one, whose rows and decision are taken as the epoch ends."""
    data = Numbered(NUM_STEPS * 64)
    session, model, optimizer = begin_job(
        data, local_batch_size=32, window_steps=1, policy=None, global_batch="fixed", min_local_batch_size=1
    )
    for _ in session.epochs(1):
        for batch in session.loader:
            if session.position + session.global_batch_size == len(data):
                hold_back_other_threads()
            train_step(session, model, optimizer, batch)
    end(session)


def hold_back_other_threads() -> None:
    """Let them run only while this thread waits."""
    processors = sorted(os.sched_getaffinity(0))
    mine = processors[dist.get_rank() % len(processors)]
    for thread in [int(task.name) for task in Path("/proc/self/task").iterdir()]:
        os.sched_setaffinity(thread, {mine})
        if thread != os.getpid():
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))


def main() -> None:
    """Fork a pair for each end; a rank trains and falls out of the script. Prints their exit codes."""
    codes: dict[str, list[int]] = {}
    torch.set_num_threads(1)
    directory = tempfile.mkdtemp()
    for how, end in ENDS.items():
        children = []
        for rank in range(NUM_RANKS):
            child = os.fork()
            if child == 0:
                meeting = f"file://{directory}/{how}"
                dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=NUM_RANKS)
                train(end)
                return
            children.append(child)
        codes[how] = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    shutil.rmtree(directory)
    sys.stdout.write(json.dumps(codes))


@pytest.mark.slow
@pytest.mark.timeout(210)
def test_a_script_may_end_in_any_way() -> None:
    codes = json.loads(_python("-m", "tests.trainer.test_lent_tensors"))
    assert codes == {"closes": [0, 0], "destroys": [0, 0], "leaves": [0, 0], "fails": [1, 1]}


if __name__ == "__main__":
    main()
