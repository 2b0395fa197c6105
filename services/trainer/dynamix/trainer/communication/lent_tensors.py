"""Lent tensors: handed to a process group without a thread of the group ever needing the interpreter.

A thread of gloo keeps the work of a collective, and so its tensors, for a moment after others have seen that it is
done. Torch ties the Python object of a tensor to the references in C++: the thread that drops the last of them but
Python's own takes the interpreter's lock to say so, however many references Python has (c10/util/intrusive_ptr.h,
"PyObject preservation", torch 2.10; older ones do where Python has let go first). If the interpreter is being taken
down by then, the thread is ended in the middle of a destructor and the process aborts after its last step: "terminate
called without an active exception".

So a tensor is lent as an alias, to which C++ has one more reference for as long as a thread may have one. It is counted
once too often from the beginning: nothing has to be done at the end of a process, in whichever way it ends.
"""

import contextlib
import ctypes
import gc
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

# Its functions have the default group as it was when they were defined for an argument, and torch imports it with the
# first DDP model: defined before there is a group, they do not keep one, and its threads, past destroy_process_group.
import torch.distributed.nn.functional

T = TypeVar("T")

NOT_LENT = 2
"""References to an alias that no thread holds: its Python object's and its keeper's."""

CONTEXT = "context"
"""What `torch.autograd.graph._engine_run_backward` calls the contextvars that it leaves with the thread."""
HAS_CONTEXT = hasattr(torch._C, "_remove_obj_from_tls")  # noqa: SLF001 - older ones keep it until the next pass
if HAS_CONTEXT:  # bound once: in the middle of a step each look-up of a name finds empty caches
    from torch._C import _get_obj_in_tls, _is_key_in_tls, _remove_obj_from_tls, _stash_obj_in_tls


class _Keeper(NamedTuple):
    """An alias, and the tensor that holds a reference to it in C++: as its gradient, which is one."""

    alias: torch.Tensor
    holder: torch.Tensor


_late: deque[_Keeper] = deque()
"""Taken back while a thread still had a reference; looked at again before the next tensor is lent."""


class LentTensor:
    """A tensor of ours and the alias of it that a process group may have; made once and lent again and again."""

    def __init__(self, tensor: torch.Tensor) -> None:
        _look_again()
        self.tensor = tensor
        self.alias = tensor.detach()
        keeper = _Keeper(self.alias, self.alias.detach())
        keeper.holder.grad = self.alias
        keep_for_ever(keeper.holder)
        weakref.finalize(self, _take_back, keeper).atexit = False  # the group may be used after our exit handlers


def launched(launch: Callable[..., T], *arguments: Any) -> T:
    """What `launch` returns, a collective's work, which holds no Python object of the backward pass that it began in.

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


def forget_imports() -> None:
    """Collect garbage once, 0.2 s, so that a process group can end with the function that made its model.

    The first DDP model imports torch._dynamo, which leaves its frames in a cycle (`torch.fx.wrap`), and with them those
    of all callers: what they name, such as the model and so its group, would live to the end of the process.
    """
    gc.collect()


def keep_for_ever(thing: object) -> None:
    """Count one reference more than there are, so that the object outlives the interpreter."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _look_again() -> None:
    """Take back what can be by now; several threads may do so at a time."""
    for _ in range(len(_late)):
        with contextlib.suppress(IndexError):  # another one has taken it
            _take_back(_late.popleft())


def _take_back(keeper: _Keeper) -> None:
    """Free an alias that no thread holds; one that a thread holds has another chance, and at worst is never freed."""
    if _is_returned(keeper.alias):
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(keeper.holder))
    else:
        _late.append(keeper)


def _is_returned(alias: torch.Tensor) -> bool:
    """Whether nothing but its Python object and its keeper has it, which no thread of a group can change any more."""
    return alias._use_count() <= NOT_LENT  # type: ignore[attr-defined, no-any-return]  # noqa: SLF001 - no public name
