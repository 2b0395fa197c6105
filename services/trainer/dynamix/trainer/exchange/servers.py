"""Gradient servers: processes without a model that sum parts of the gradients of a job, and know nothing else of it.

A server listens at an address and waits for one job after the other. Rank 0 announces a job; ranks and servers then
make process groups (`transport.GradientServers` is the ranks' side). One thread per group does what rank 0 tells it:
pieces may come in either lane, sums go back in the second one. A thread waits for rank 0 without limit, since ranks may
compute, evaluate or save; the end of a rank's process ends its connections. A server keeps nothing from one sum to the
next, so that a job that is started again finds it as it was.
"""

import threading
from collections.abc import Callable
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore  # public, missing in the stubs of torch.distributed

from dynamix.trainer.exchange.codec import sum_in_rank_order
from dynamix.trainer.exchange.collectives import Trade
from dynamix.trainer.exchange.transport import (
    DTYPES,
    END,
    TELL_TAG,
    JobAnnouncement,
    LentTensor,
    ToldTrade,
    break_group,
    job_key,
    make_groups,
    open_store,
    perform,
)

FOR_EVER = timedelta(days=365)


class Answers:
    """Sums that wait until the ranks take them back."""

    def __init__(self) -> None:
        self._by_number: dict[int, Tensor] = {}
        self._changed = threading.Condition()
        self._has_failed = False

    def put(self, number: int, total: Tensor) -> None:
        """Keep a sum."""
        with self._changed:
            self._by_number[number] = total
            self._changed.notify_all()

    def fail(self) -> None:
        """Make `take` raise: no further sums will come."""
        with self._changed:
            self._has_failed = True
            self._changed.notify_all()

    def take(self, number: int) -> Tensor:
        """The sum of that number, once it is available.

        Raises:
            RuntimeError: when the other lane has failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: number in self._by_number or self._has_failed)
            if number not in self._by_number:
                raise RuntimeError("the other lane has failed")
            return self._by_number.pop(number)


class ServedJob:
    """One job, from the first exchange to the last."""

    def __init__(self, groups: list[dist.ProcessGroup], num_ranks: int, num_servers: int) -> None:
        self._groups = groups
        self._num_ranks = num_ranks
        self._num_servers = num_servers
        self._answers = Answers()
        self._left = len(groups)
        self._ended = threading.Condition()
        self.problem = ""
        """The error that ended the job early."""
        for number, group in enumerate(groups):
            threading.Thread(
                target=self._run, args=(group,), name=f"dynamix server lane {number}", daemon=True
            ).start()  # daemons: one that waits for a host that vanished would keep the process

    def wait(self, timeout_s: float) -> bool:
        """Whether the job has ended within this time."""
        with self._ended:
            return self._ended.wait_for(lambda: not self._left, timeout_s)

    def break_off(self, problem: str) -> None:
        """End the job here: nothing waits for it any more, in no process."""
        with self._ended:
            self.problem = self.problem or problem
        self._answers.fail()
        for group in self._groups:
            break_group(group)

    def _run(self, group: dist.ProcessGroup) -> None:
        try:
            while (told := _next_trade(group)) != END:
                self._take_part(told, group)
        except Exception as error:  # noqa: BLE001 - said by the server, which goes on with the next job
            self.break_off(str(error))
        with self._ended:
            self._left -= 1
            self._ended.notify_all()

    def _take_part(self, told: ToldTrade, group: dist.ProcessGroup) -> None:
        nothing = torch.empty(0, dtype=DTYPES[told.dtype])
        from_ranks = [*[told.size] * self._num_ranks, *[0] * self._num_servers]
        no_sizes = [0] * len(from_ranks)
        if told.is_answer:
            total = self._answers.take(told.number)
            perform(Trade(nothing, total.repeat(self._num_ranks), no_sizes, from_ranks), group)
            return
        pieces = torch.empty(told.size * self._num_ranks, dtype=nothing.dtype)
        perform(Trade(pieces, nothing, from_ranks, no_sizes), group)
        self._answers.put(told.number, sum_in_rank_order(list(torch.split(pieces, from_ranks[: self._num_ranks]))))


def _next_trade(group: dist.ProcessGroup) -> ToldTrade:
    lent = LentTensor(torch.empty(len(END), dtype=torch.int64))
    group.recv([lent.alias], 0, TELL_TAG).wait(FOR_EVER)
    return ToldTrade(*lent.tensor.tolist())


LOOK_S = 0.2
"""Seconds between two polls for another job: the store has no notification."""


class GradientServer:
    """Serves one job after the other."""

    def __init__(self, port: int, say: Callable[[str], None]) -> None:
        """Listen on a port of all addresses, 0 for a free one; `say` gets a line when a job begins or ends.

        Raises:
            RuntimeError: when the port is taken.
        """
        self._store = TCPStore("localhost", port, is_master=True, wait_for_workers=False)
        self._say = say
        self.port: int = self._store.port

    def run(self, stop: threading.Event) -> None:
        """Serve until `stop` is set."""
        number = 1
        while not stop.is_set():
            if self._store.check([job_key(number)]):
                self._serve(number, stop)
                number += 1
            else:
                stop.wait(LOOK_S)

    def _announcement(self, number: int) -> JobAnnouncement:
        return msgspec.json.decode(self._store.get(job_key(number)), type=JobAnnouncement)

    def _serve(self, number: int, stop: threading.Event) -> None:
        found = self._announcement(number)
        self._say(f"{found.job}: {found.num_ranks} ranks, server {found.index} of {found.num_servers}")
        rank, size = found.num_ranks + found.index, found.num_ranks + found.num_servers
        try:
            meeting = open_store(found.meeting)
            groups = make_groups(meeting, found.number, rank, size, timedelta(seconds=found.timeout_s))
        except RuntimeError as error:
            self._say(f"{found.job}: does not meet us: {error}")
            return
        job = ServedJob(groups, found.num_ranks, found.num_servers)
        while not job.wait(LOOK_S) and not stop.is_set():
            if self._starts_again(found.job, number + 1):
                job.break_off("it starts again")
                self._say(f"{found.job}: starts again before it has ended")
                return
        self._say(f"{found.job}: ended" + (f" early: {job.problem}" if job.problem else ""))

    def _starts_again(self, job: str, number: int) -> bool:
        """Whether the same job is announced again, because the hosts of its earlier start have vanished."""
        return bool(self._store.check([job_key(number)])) and self._announcement(number).job == job
