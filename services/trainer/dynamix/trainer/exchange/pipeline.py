"""Pipeline: carries out the collectives of codecs between the ranks of a job, and with its gradient servers.

Two threads ("lanes") have a gloo group each. The first collective of a bucket runs in the first lane, all that follow
in the second one: while the sums of a bucket come back, the next bucket is already on its way. Both take buckets in the
order in which the training thread sends them, which is that of the backward pass and so the same on all ranks.

Where gradient servers take part, each lane has one more group, with them. When a collective fails in one lane, all
groups of both are broken: no rank or server waits for this rank longer than for one whose process has ended.
"""

import contextlib
import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue

import torch
import torch.distributed as dist

from dynamix.trainer.exchange.collectives import Collective, Leg, Trade
from dynamix.trainer.exchange.servers import GradientServers, ServedGroup
from dynamix.trainer.exchange.transport import LentTensor, break_group, keep_for_ever, perform

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
            RuntimeError: when it failed, or one before it: as from an all-reduce, training cannot continue.
        """
        self._done.wait()
        if self._error is not None:
            raise RuntimeError(f"the exchange between the ranks failed: {self._error}") from self._error


_Task = tuple[Leg, UnderWay]


class _Lane:
    """A thread, its tasks, and its process groups."""

    def __init__(self, group: dist.ProcessGroup, served: ServedGroup | None) -> None:
        self.group = group
        self.served = served
        self.tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self.thread: threading.Thread

    def carry_out(self, collective: Collective) -> None:
        """Carry out a collective in the group that it is for, and wait for it."""
        group = self.group
        if isinstance(collective, Trade) and collective.served is not None:
            assert self.served is not None, "there are no servers"
            group = self.served.trade(collective, collective.served)
        perform(collective, group)


class Pipeline:
    """Two threads with a process group each; all ranks make it at the same point and send the same buckets."""

    def __init__(self, timeout: timedelta | None = None, servers: GradientServers | None = None) -> None:
        """A collective call; `timeout` is that of the groups, torch's own when not given.

        Raises:
            RuntimeError: when a server cannot be reached, or does not join.
        """
        groups = [dist.new_group(backend="gloo", timeout=timeout) for _ in range(2)]
        served: list[ServedGroup] | list[None] = [None, None]
        if servers is not None and servers.addresses:
            announced = LentTensor(torch.tensor([servers.announce(timeout)]))
            groups[0].broadcast(announced.alias, 0).wait()
            served = servers.meet(int(announced.tensor.item()), timeout)
        self._lanes = [_Lane(*both) for both in zip(groups, served, strict=True)]
        self._error: BaseException | None = None
        """The first error, in either thread; later ones are consequences."""
        self._lock = threading.Lock()
        for number, (lane, work) in enumerate(zip(self._lanes, (self._begin, self._complete), strict=True)):
            lane.thread = threading.Thread(
                target=self._run, args=(lane, work), name=f"dynamix exchange {number}", daemon=True
            )  # a daemon: a process that fails must not wait for a rank that is gone
            lane.thread.start()

    def send(self, leg: Leg) -> UnderWay:
        """Carry out a leg behind all that were sent before it."""
        under_way = UnderWay()
        self._lanes[0].tasks.put((leg, under_way))
        return under_way

    def close(self) -> None:
        """End the threads and leave the groups, where nothing is under way in them. No collective."""
        for lane in self._lanes:
            lane.tasks.put(None)
            lane.thread.join(CLOSE_S)
        lanes, self._lanes = self._lanes, []
        for lane in lanes:
            if lane.thread.is_alive():
                keep_for_ever(lane)
            else:
                with contextlib.suppress(ValueError):  # the script has destroyed it, with all others
                    dist.destroy_process_group(lane.group)

    def _run(self, lane: _Lane, work: Callable[[_Lane, _Task], None]) -> None:
        """Carry out tasks; after the first failure in either thread every task fails, because ranks are out of step."""
        while (task := lane.tasks.get()) is not None:
            leg, under_way = task
            failed = self._error
            if failed is None:
                try:
                    work(lane, task)  # which may pass the task on: then it is the other lane's
                except BaseException as error:  # noqa: BLE001 - the training thread raises it
                    failed = self._fail(error)
            if failed is not None:
                leg.close()
                under_way.finish(failed)
            del task, leg, under_way  # else they live until the next task comes
        if self._error is None and lane.served is not None:
            try:
                lane.served.leave()
            except RuntimeError as error:
                _log.warning("a gradient server was gone before it was told of the end of the job: %s", error)

    def _fail(self, error: BaseException) -> BaseException:
        """Break all groups, at the first failure; returns that one."""
        with self._lock:
            if self._error is not None:
                return self._error
            self._error = error
        for lane in self._lanes:
            break_group(lane.group)
            if lane.served is not None and lane.served.group is not None:
                break_group(lane.served.group)
        return error

    def _begin(self, lane: _Lane, task: _Task) -> None:
        """Carry out the first collective of a bucket, and hand the rest to the second thread."""
        first = next(task[0], None)
        if first is None:
            task[1].finish()
            return
        lane.carry_out(first)
        self._lanes[1].tasks.put(task)

    def _complete(self, lane: _Lane, task: _Task) -> None:
        """Carry out all further collectives of a leg."""
        for collective in task[0]:
            lane.carry_out(collective)
        task[1].finish()
