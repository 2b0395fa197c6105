"""Lanes of a server: one thread for each process group of a job, which does what rank 0 tells it.

Pieces may come in either lane, sums go back in the second one. A thread waits for rank 0 without limit: ranks may
compute, evaluate or save for as long as they like, and the end of a rank's process ends its connections. When one lane
fails, the groups of both are broken: the process goes on, and ranks would wait for its part until their time-out.
"""

import threading
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from dynamix.trainer.communication.broken_groups import break_group
from dynamix.trainer.communication.gradient_servers import DTYPES, END, TELL_TAG, ToldTrade
from dynamix.trainer.communication.lent_tensors import LentTensor
from dynamix.trainer.communication.pipeline import perform
from dynamix.trainer.exchange.collectives import Trade

from .sums import sum_of_pieces

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
        """Let `take` raise: no more sums will come."""
        with self._changed:
            self._has_failed = True
            self._changed.notify_all()

    def take(self, number: int) -> Tensor:
        """The sum of that number, once it is there.

        Raises:
            RuntimeError: when the other lane has failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: number in self._by_number or self._has_failed)
            if number not in self._by_number:
                raise RuntimeError("the other lane has failed")
            return self._by_number.pop(number)


class ServedJob:
    """One job, from the first trade to the last."""

    def __init__(self, groups: list[dist.ProcessGroup], num_ranks: int, num_servers: int) -> None:
        self._groups = groups
        self._num_ranks = num_ranks
        self._num_servers = num_servers
        self._answers = Answers()
        self._left = len(groups)
        self._ended = threading.Condition()
        self.problem = ""
        """What ended the job before its time."""
        for number, group in enumerate(groups):
            threading.Thread(
                target=self._run, args=(group,), name=f"dynamix server lane {number}", daemon=True
            ).start()  # daemons: one that waits for a host that vanished would keep the process

    def wait(self, timeout_s: float) -> bool:
        """Whether the job has ended, by then at the latest."""
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
        self._answers.put(told.number, sum_of_pieces(torch.split(pieces, from_ranks[: self._num_ranks]), told.width))


def _next_trade(group: dist.ProcessGroup) -> ToldTrade:
    lent = LentTensor(torch.empty(len(END), dtype=torch.int64))
    group.recv([lent.alias], 0, TELL_TAG).wait(FOR_EVER)
    return ToldTrade(*lent.tensor.tolist())
