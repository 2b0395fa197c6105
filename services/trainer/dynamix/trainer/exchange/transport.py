"""Collectives over a process group whose threads never need the interpreter: tensors are lent to it.

A thread of a group that drops its reference to a Python object calls Python, perhaps while the interpreter is being
taken down. `LentTensor` gives it an alias that outlives its references.
"""

import contextlib
import ctypes
import weakref
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.nn.functional

from .codec import Collective, Largest, Sum, Trade, Union

# Its functions have the default group as it was when they were defined for an argument, and torch imports it with the
# first DDP model: defined before there is a group, they do not keep one, and its threads, past destroy_process_group.

T = TypeVar("T")

NOT_LENT = 2
"""References to an alias that no thread holds: its Python object's and its holder's."""

CONTEXT = "context"
"""Name in `torch.autograd.graph._engine_run_backward` of the contextvars that it leaves in the thread."""
HAS_CONTEXT = hasattr(torch._C, "_remove_obj_from_tls")  # noqa: SLF001 - older ones keep it until the next pass
if HAS_CONTEXT:  # bound once: in the middle of a step each look-up of a name finds empty caches
    from torch._C import _get_obj_in_tls, _is_key_in_tls, _remove_obj_from_tls, _stash_obj_in_tls


_late: deque[tuple[torch.Tensor, torch.Tensor]] = deque()
"""Taken back while a thread still had a reference; checked again before the next tensor is lent.

An alias, and the tensor that holds a reference to it in C++: as its gradient, which is one.
"""


class LentTensor:
    """A tensor of ours and the alias of it that a process group may have; made once and lent again and again."""

    def __init__(self, tensor: torch.Tensor) -> None:
        for _ in range(len(_late)):
            with contextlib.suppress(IndexError):  # another thread has taken it
                _take_back(*_late.popleft())
        self.tensor = tensor
        self.alias = tensor.detach()
        holder = self.alias.detach()
        holder.grad = self.alias
        keep_for_ever(holder)
        finalizer = weakref.finalize(self, _take_back, self.alias, holder)
        finalizer.atexit = False  # the group may be used after our exit handlers


def launched(launch: Callable[..., T], *arguments: Any) -> T:
    """The work of a collective, without references to Python objects of the backward pass that it began in.

    Torch leaves one with the thread for the length of a backward pass, and a work keeps what it finds there.
    """
    if not HAS_CONTEXT or not _is_key_in_tls(CONTEXT):
        return launch(*arguments)
    context = _get_obj_in_tls(CONTEXT)
    _remove_obj_from_tls(CONTEXT)
    try:
        return launch(*arguments)
    finally:
        _stash_obj_in_tls(CONTEXT, context)


def keep_for_ever(thing: object) -> None:
    """Count one reference more than there are, so that the object outlives the interpreter."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _take_back(alias: torch.Tensor, holder: torch.Tensor) -> None:
    """Free an alias that no thread holds; one that a thread holds has another chance, and at worst is never freed."""
    if alias._use_count() <= NOT_LENT:  # type: ignore[attr-defined]  # noqa: SLF001 - no public name
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(holder))
    else:
        _late.append((alias, holder))


UNUSED_TAG = 2
"""A tag with which nothing is ever sent."""
MOMENT = timedelta(milliseconds=1)
TRADE_TAG = 3


def break_group(group: dist.ProcessGroup) -> None:
    """Close the connections of a gloo group, which is of no use any more; what waits in it raises RuntimeError."""
    for peer in range(group.size()):
        if peer == group.rank():
            continue
        lent = LentTensor(torch.empty(1))
        with contextlib.suppress(RuntimeError):  # the time-out, or a connection to this peer that was closed already
            group.recv([lent.alias], peer, UNUSED_TAG).wait(MOMENT)


def trade(collective: Trade, group: dist.ProcessGroup) -> None:
    """Carry out an all-to-all with all receives posted before the first send.

    Gloo's own posts a send before its receive: where ranks arrive apart, a link carries one direction after the other.
    """
    rank, size = group.rank(), group.size()
    received = torch.split(collective.received, collective.received_sizes)
    sent = torch.split(collective.sent, collective.sent_sizes)
    before, behind = ([(rank + step * distance) % size for distance in range(1, size)] for step in (-1, 1))
    # the works belong to this thread alone, and so nothing need be lent
    works = [group.recv([received[peer]], peer, TRADE_TAG) for peer in before if collective.received_sizes[peer]]
    works += [group.send([sent[peer]], peer, TRADE_TAG) for peer in behind if collective.sent_sizes[peer]]
    received[rank].copy_(sent[rank])
    for work in works:
        work.wait()


def perform(collective: Collective, group: dist.ProcessGroup) -> None:
    """Carry out one collective and wait for it; by the group's own methods, as `steering.collectives` does."""
    if isinstance(collective, Trade):
        trade(collective, group)
        return
    options = dist.AllreduceOptions()
    operations = {Sum: dist.ReduceOp.SUM, Union: dist.ReduceOp.BOR, Largest: dist.ReduceOp.MAX}
    options.reduceOp = dist.ReduceOp(operations[type(collective)])
    lent = LentTensor(collective.tensor)
    group.allreduce([lent.alias], options).wait()


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """The time-out of a process group; `None` if its back end does not provide one."""
    devices = [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]
    for device in devices:
        with contextlib.suppress(RuntimeError, AttributeError):
            return group._get_backend(device).options._timeout  # noqa: SLF001 - no public name
    return None
