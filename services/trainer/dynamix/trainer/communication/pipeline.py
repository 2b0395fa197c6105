"""The pipeline: carries out the collectives of codecs in two threads, each with a gloo group of its own.

The first collective of a bucket runs in the first lane, all that follow in the second one: while the sums of a bucket
come back, the next bucket is already on its way. Both lanes take buckets in the order in which the training thread
sends them, which is that of the backward pass and so the same on all ranks. Nothing ever waits in a callback of a
process group. One thread with one group would send in one direction at a time.

Where gradient servers take part, each lane has one more group, with them; what they do not take part in stays in the
ranks' own. When a collective fails in one lane, all groups of both are broken: no rank or server waits for this rank
longer than for one whose process has ended.
"""

import contextlib
import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import NamedTuple

import torch
import torch.distributed as dist

from dynamix.trainer.exchange.collectives import Collective, Leg, Sum, Trade, Union

from .broken_groups import break_group
from .gradient_servers import GradientServers, ServedGroup
from .lent_tensors import LentTensor, keep_for_ever

_log = logging.getLogger("dynamix.trainer")

CLOSE_S = 2.0
"""Longest wait for a lane to end: one that waits for a rank that is gone does so until its group's time-out."""


class UnderWay:
    """A leg that is under way; `wait` is called in the training thread."""

    __slots__ = ("_done", "_error")

    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None

    def finish(self, error: BaseException | None = None) -> None:
        """Let `wait` return, or raise."""
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
    """The process groups of a lane."""

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
        """Let the servers know that nothing follows."""
        if self.served is not None:
            self.served.leave()

    def break_off(self) -> None:
        """Let everything that waits in the groups fail, here and in other processes."""
        break_group(self.own)
        if self.served is not None:
            self.served.break_off()


class _FirstFailure:
    """What went wrong first in a pipeline, for both of its lanes: what goes wrong then is a consequence."""

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
    """A thread that works on tasks in their order, with a process group of its own."""

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
    """What a lane's thread does; after the first failure in either lane every task fails: ranks are not in step."""
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
        """Carry out a leg's first collective, and leave the rest to the second lane."""
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
    """The time-out of a process group; `None` where its back end does not say."""
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
