"""Transport: carries out the collectives of codecs between the ranks of a job, and with its gradient servers.

Two threads ("lanes") have a gloo group each. The first collective of a bucket runs in the first lane, all that follow
in the second one: while the sums of a bucket come back, the next bucket is already on its way. Both take buckets in the
order in which the training thread sends them, which is that of the backward pass and so the same on all ranks. Nothing
waits in a callback of a process group, and no thread of a group needs the interpreter (`LentTensor`).

Where gradient servers take part, each lane has one more group, with them. When a collective fails in one lane, all
groups of both are broken: no rank or server waits for this rank longer than for one whose process has ended.
"""

import contextlib
import ctypes
import gc
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar, cast

import msgspec
import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore  # public, missing in the stubs of dist

from dynamix.trainer.exchange.collectives import Collective, Leg, ServedSum, Sum, Trade, Union

# Its functions have the default group as it was when they were defined for an argument, and torch imports it with the
# first DDP model: defined before there is a group, they do not keep one, and its threads, past destroy_process_group.

T = TypeVar("T")

NOT_LENT = 2
"""References to an alias that no thread holds: its Python object's and its keeper's."""

CONTEXT = "context"
"""Name in `torch.autograd.graph._engine_run_backward` of the contextvars that it leaves in the thread."""
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
    """Whether only its Python object and its keeper refer to it, so that no thread of a group can change it."""
    return alias._use_count() <= NOT_LENT  # type: ignore[attr-defined, no-any-return]  # noqa: SLF001 - no public name


UNUSED_TAG = 2
"""A tag with which nothing is ever sent."""
MOMENT = timedelta(milliseconds=1)


def break_group(group: dist.ProcessGroup) -> None:
    """Close the connections of a gloo group, which is of no use any more; what waits in it raises RuntimeError."""
    for peer in range(group.size()):
        if peer == group.rank():
            continue
        lent = LentTensor(torch.empty(1))
        with contextlib.suppress(RuntimeError):  # the time-out, or a connection to this peer that was closed already
            group.recv([lent.alias], peer, UNUSED_TAG).wait(MOMENT)


NUM_GROUPS = 2
"""One process group for each thread."""
TELL_TAG = 1
REACH_S = 10.0
"""Longest wait for a server's address to answer."""
MEETING_S = 60.0
"""Longest wait for the servers to join: one that serves another job does not."""
DEFAULT_TIMEOUT = timedelta(minutes=30)
"""Torch's own, for gloo."""
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.uint8)
"""Element types of exchanged tensors; a message names one by its index."""
JOBS_KEY = "jobs"
"""Key in the store of the number of announced jobs."""


class JobAnnouncement(msgspec.Struct, frozen=True, kw_only=True):
    """Rank 0's announcement of a job, in the store of a server."""

    job: str
    num_ranks: int
    num_servers: int
    index: int
    """Which of the servers reads it."""
    meeting: str
    """Address of the store at which all meet."""
    number: int
    """Which of the jobs at that store it is."""
    timeout_s: float
    """Time-out of the process groups."""


class ToldTrade(NamedTuple):
    """Message to a server before an exchange: its size and type."""

    number: int
    """Which sum it belongs to; -1: no more trades in this group."""
    is_answer: int
    dtype: int
    """Position among `DTYPES`."""
    size: int
    """Elements of the server's piece of each rank."""


END = ToldTrade(-1, 0, 0, 0)


class ServedGroup:
    """The process group of one thread, in a rank."""

    def __init__(self, group: dist.ProcessGroup, rank: int, num_ranks: int, num_servers: int) -> None:
        self._group: dist.ProcessGroup | None = group
        self._rank = rank
        self._num_ranks = num_ranks
        self._num_servers = num_servers

    def trade(self, trade: Trade, served: ServedSum) -> dist.ProcessGroup:
        """Announce an exchange to the servers, in rank 0; returns the group in which it is carried out."""
        assert self._group is not None, "left"
        dtype = DTYPES.index(trade.sent.dtype)
        for index, size in enumerate(served.sizes):
            self._tell(index, ToldTrade(served.number, int(trade.is_answer), dtype, size))
        return self._group

    def leave(self) -> None:
        """Leave the group; rank 0 tells the servers that nothing follows. No collective."""
        for index in range(self._num_servers):
            self._tell(index, END)
        self._group = None

    def break_off(self) -> None:
        """Abort everything that waits in the group, here, in the servers and in other ranks."""
        group = self._group
        if group is not None:
            break_group(group)

    def _tell(self, index: int, told: ToldTrade) -> None:
        if self._rank == 0:
            assert self._group is not None, "left"
            lent = LentTensor(torch.tensor(told))
            self._group.send([lent.alias], self._num_ranks + index, TELL_TAG).wait()


class GradientServers:
    """The servers of a job, none or several, and the ranks that meet them."""

    def __init__(self, addresses: Sequence[str], job: str, rank: int, num_ranks: int) -> None:
        self.addresses = tuple(addresses)
        self._job = job
        self.rank = rank
        self.num_ranks = num_ranks

    def meet(self, share: Callable[[int], int], timeout: timedelta | None) -> list[ServedGroup]:
        """Make the groups; a collective. `share` returns rank 0's number in all ranks.

        Raises:
            RuntimeError: on all ranks, when a server cannot be reached or does not join.
        """
        number, problem = 0, ""
        if self.rank == 0:
            try:
                number = self._announce(timeout or DEFAULT_TIMEOUT)
            except RuntimeError as error:
                problem = f": {error}"
        number = share(number)
        if not number:
            raise RuntimeError(
                f"the gradient servers {', '.join(self.addresses)} cannot all be reached{problem}; start "
                "`dynamix serve-gradients` at each address"
            )
        try:
            store = open_store(self.addresses[0])
            size = self.num_ranks + len(self.addresses)
            groups = make_groups(store, number, self.rank, size, timeout or DEFAULT_TIMEOUT)
        except RuntimeError as error:
            raise RuntimeError(
                f"the gradient servers {', '.join(self.addresses)} do not join within {MEETING_S:g} s: {error}; each "
                "serves one job at a time, and must reach the first one's address and all ranks"
            ) from error
        return [ServedGroup(group, self.rank, self.num_ranks, len(self.addresses)) for group in groups]

    def _announce(self, timeout: timedelta) -> int:
        """Tell every server of the job; returns its number at the first one, from 1."""
        stores = [open_store(address) for address in self.addresses]
        numbers = [store.add(JOBS_KEY, 1) for store in stores]
        for index, store in enumerate(stores):
            announcement = JobAnnouncement(
                job=self._job,
                num_ranks=self.num_ranks,
                num_servers=len(stores),
                index=index,
                meeting=self.addresses[0],
                number=numbers[0],
                timeout_s=timeout.total_seconds(),
            )
            store.set(job_key(numbers[index]), msgspec.json.encode(announcement).decode())
        return numbers[0]


def job_key(number: int) -> str:
    """Key in the store under which a server finds a job."""
    return f"job/{number}"


def split_address(address: str) -> tuple[str, int]:
    """Host and port of a server.

    Raises:
        ValueError: for anything but HOST:PORT.
    """
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"gradient server {address!r}: write HOST:PORT, as `dynamix serve-gradients --port` has it")
    return host.strip("[]"), int(port)


def open_store(address: str) -> TCPStore:
    """Reach a server's store. Raises RuntimeError when nothing answers."""
    host, port = split_address(address)
    store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=REACH_S), wait_for_workers=False)
    store.set_timeout(timedelta(seconds=MEETING_S))
    return store


def make_groups(store: TCPStore, number: int, rank: int, size: int, timeout: timedelta) -> list[dist.ProcessGroup]:
    """The groups of a job, outside of torch's default group; a collective of its ranks and servers.

    Raises:
        RuntimeError: when not all have come within `MEETING_S`: the groups would wait for them until `timeout`.
    """
    arrived = [f"{job_key(number)}/arrived/{each}" for each in range(size)]
    store.set(arrived[rank], "")
    store.wait(arrived, timedelta(seconds=MEETING_S))
    prefixes = [PrefixStore(f"{job_key(number)}/lane/{lane}", store) for lane in range(NUM_GROUPS)]
    return [cast("dist.ProcessGroup", ProcessGroupGloo(prefix, rank, size, timeout)) for prefix in prefixes]


_log = logging.getLogger("dynamix.trainer")

CLOSE_S = 2.0
"""Longest wait for a thread to end; it may wait for a dead rank until the time-out of its group."""


class UnderWay:
    """A leg that is under way; `wait` is called in the training thread."""

    __slots__ = ("_done", "_error")

    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None

    def finish(self, error: BaseException | None = None) -> None:
        """Make `wait` return or raise."""
        self._error = error
        self._done.set()

    def wait(self) -> None:
        """Return when the leg has ended.

        Raises:
            RuntimeError: when it failed, or one before it: as from an all-reduce, training cannot go on.
        """
        self._done.wait()
        if self._error is not None:
            raise RuntimeError(f"the exchange between the ranks failed: {self._error}") from self._error


_Task = tuple[Leg, UnderWay]


class _LaneGroups(NamedTuple):
    """The process groups of a thread."""

    own: dist.ProcessGroup
    """The ranks' own."""
    served: ServedGroup | None
    """With the servers behind them."""

    def carry_out(self, collective: Collective) -> None:
        """Carry out a collective in the group that it is for, and wait for it."""
        if not isinstance(collective, Trade) or collective.served is None:
            perform(collective, self.own)
            return
        assert self.served is not None, "there are no servers"
        perform(collective, self.served.trade(collective, collective.served))

    def leave(self) -> None:
        """Tell the servers that nothing follows."""
        if self.served is not None:
            self.served.leave()

    def break_off(self) -> None:
        """Abort everything that waits in the groups, here and in other processes."""
        break_group(self.own)
        if self.served is not None:
            self.served.break_off()


class _FirstFailure:
    """The first error of a pipeline, for both threads; later ones are consequences."""

    def __init__(self, lanes: list[_LaneGroups]) -> None:
        self._lanes = lanes
        self._lock = threading.Lock()
        self.error: BaseException | None = None

    def report(self, error: BaseException) -> BaseException:
        """Break the groups, at the first failure; returns that one."""
        with self._lock:
            lanes, self._lanes = self._lanes, []
            self.error = first = self.error or error
        for groups in lanes:
            groups.break_off()
        return first


class Pipeline:
    """Two lanes with a process group each; all ranks make it at the same point and send the same legs to it."""

    def __init__(self, timeout: timedelta | None = None, servers: GradientServers | None = None) -> None:
        """A collective call; `timeout` is that of the groups, torch's own when not given.

        Raises:
            RuntimeError: when a server cannot be reached, or does not join.
        """
        groups = [dist.new_group(backend="gloo", timeout=timeout) for _ in range(2)]
        served: list[ServedGroup] | list[None] = [None, None]
        if servers is not None and servers.addresses:
            served = servers.meet(lambda number: _of_rank_0(number, groups[0]), timeout)
        lanes = [_LaneGroups(own, each) for own, each in zip(groups, served, strict=True)]
        failure = _FirstFailure(lanes)
        self._second = _Lane("second", lanes[1], _finish, failure)
        self._first = _Lane("first", lanes[0], _begin_and_pass_on(self._second), failure)

    def send(self, leg: Leg) -> UnderWay:
        """Carry out a leg behind all that were sent before it."""
        task = (leg, UnderWay())
        self._first.put(task)
        return task[1]

    def close(self) -> None:
        """End the threads and leave the groups, where nothing is under way in them. No collective."""
        self._first.close()
        self._second.close()


class _Lane:
    """A thread that carries out tasks in order, with its own process group."""

    def __init__(self, name: str, groups: _LaneGroups, work: "_Work", failure: _FirstFailure) -> None:
        self._groups: _LaneGroups | None = groups
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        arguments = (self._tasks, groups, work, failure)
        self._thread = threading.Thread(
            target=_run_lane, args=arguments, name=f"dynamix exchange {name}", daemon=True
        )  # a daemon: a process that fails must not wait for a rank that is gone
        self._thread.start()

    def put(self, task: _Task) -> None:
        """Add a task behind the others."""
        self._tasks.put(task)

    def close(self) -> None:
        """End the thread behind its last task, and leave the groups."""
        groups, self._groups = self._groups, None
        if groups is None:
            return
        self._tasks.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            keep_for_ever(groups)
            return
        with contextlib.suppress(ValueError):  # the script has destroyed it, with all others
            dist.destroy_process_group(groups.own)


_Work = Callable[[_Task, _LaneGroups], None]


def _run_lane(tasks: SimpleQueue[_Task | None], groups: _LaneGroups, work: _Work, failure: _FirstFailure) -> None:
    """Carry out tasks; after the first failure in either thread every task fails, because ranks are out of step."""
    while (task := tasks.get()) is not None:
        leg, under_way = task
        failed = failure.error
        if failed is None:
            try:
                work(task, groups)  # which may pass the task on: then it is the other lane's
            except BaseException as error:  # noqa: BLE001 - the training thread raises it
                failed = failure.report(error)
        if failed is not None:
            leg.close()
            under_way.finish(failed)
        del task, leg, under_way  # else they live until the next task comes
    if failure.error is None:
        try:
            groups.leave()
        except RuntimeError as error:
            _log.warning("a gradient server was gone before it was told of the end of the job: %s", error)


def _begin_and_pass_on(second: _Lane) -> _Work:
    def begin(task: _Task, groups: _LaneGroups) -> None:
        """Carry out the first collective of a bucket, and hand the rest to the second thread."""
        first = next(task[0], None)
        if first is None:
            task[1].finish()
            return
        groups.carry_out(first)
        second.put(task)

    return begin


def _finish(task: _Task, groups: _LaneGroups) -> None:
    """Carry out all further collectives of a leg."""
    leg, under_way = task
    for collective in leg:
        groups.carry_out(collective)
    under_way.finish()


def perform(collective: Collective, group: dist.ProcessGroup) -> None:
    """Carry out one collective and wait for it; by the group's own methods, as `steering.collectives` does."""
    if isinstance(collective, Trade):
        received, sent = LentTensor(collective.received), LentTensor(collective.sent)
        group.alltoall_base(received.alias, sent.alias, collective.received_sizes, collective.sent_sizes).wait()
        return
    options = dist.AllreduceOptions()
    if not isinstance(collective, Sum):
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.BOR if isinstance(collective, Union) else dist.ReduceOp.MAX)
    lent = LentTensor(collective.tensor)
    group.allreduce([lent.alias], options).wait()


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """The time-out of a process group; `None` if its back end does not provide one."""
    devices = [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]
    for device in devices:
        with contextlib.suppress(RuntimeError, AttributeError):
            timeout: timedelta = group._get_backend(device).options._timeout  # noqa: SLF001 - no public name
            return timeout
    return None


def _of_rank_0(number: int, group: dist.ProcessGroup) -> int:
    """Rank 0's number."""
    lent = LentTensor(torch.tensor([number]))
    group.broadcast(lent.alias, 0).wait()
    return int(lent.tensor.item())
