"""No thread of a process group enters the interpreter because of us, and groups end when they are no longer needed."""

import ctypes
import json
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support import rows
from tests.support.ranks import run_ranks
from tests.support.training import Numbered, attach_numbered, make_model, offer, train_step
from torch.nn.parallel import DistributedDataParallel

from dynamix.trainer.exchange import transport
from dynamix.trainer.exchange.transport import LentTensor
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
    session, optimizer = attach_numbered(
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


def _close_or_forget(_rank: int) -> list[bool]:
    """Whether our group is gone after either."""
    gone = []
    for closes in (True, False):
        session, _ = attach_numbered(Numbered(64), DistributedDataParallel(make_model()))
        ours = weakref.ref(session._steering.collectives._group)
        if closes:
            session.close()
        else:
            del session
        gone.append(ours() is None)
    return gone


def test_our_group_ends_with_the_session() -> None:
    assert run_ranks(_close_or_forget, 2) == [[True, True]] * 2


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


def test_a_tensor_is_owned_until_no_thread_has_it() -> None:
    data = torch.arange(3.0)
    loan = LentTensor(data)
    alias, held = weakref.ref(loan.alias), loan.alias.detach()
    held.grad = loan.alias  # a thread of a group has a reference in C++ too
    assert loan.alias.data_ptr() == data.data_ptr()
    del loan
    assert alias() is not None
    assert alias()._use_count() == 3  # Python's, the keeper's and the thread's: whose goes last matters to none
    held.grad = None
    assert alias()._use_count() == 2
    LentTensor(data)
    assert alias() is None
    assert not transport._late


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


@pytest.mark.slow
@pytest.mark.timeout(210)
def test_a_script_may_end_in_any_way() -> None:
    codes = json.loads(_python("-m", "tests.support.finishing", "1"))
    assert codes == {"closes": [0, 0], "destroys": [0, 0], "leaves": [0, 0], "fails": [1, 1]}


def _python(*arguments: str) -> str:
    environ = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], env=environ, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
