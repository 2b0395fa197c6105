"""Gradient servers, as the ranks of a job see them: how both meet, and what servers are told.

A server listens at an address and waits for jobs. Rank 0 announces its job to every server; all ranks and servers then
make process groups at the first server's store, one for each lane, in which servers follow the ranks. Before each trade
rank 0 tells the servers, in the same group, what to do in it: they know nothing of buckets or codecs.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple, cast

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore  # public, missing in the stubs of dist

from dynamix.trainer.exchange.collectives import ServedSum, Trade

from .broken_groups import break_group
from .lent_tensors import LentTensor

NUM_GROUPS = 2
"""One for each lane."""
TELL_TAG = 1
REACH_S = 10.0
"""Longest wait for a server's address to answer."""
MEETING_S = 60.0
"""Longest wait for the servers to join: one that serves another job does not."""
DEFAULT_TIMEOUT = timedelta(minutes=30)
"""Torch's own, for gloo."""
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.uint8)
"""What is traded, by number."""
JOBS_KEY = "jobs"
"""How many jobs were announced to a server."""


class JobAnnouncement(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 writes into the store of a server."""

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
    """What a server is told before a trade."""

    number: int
    """Which sum it belongs to; -1: no more trades in this group."""
    is_answer: int
    dtype: int
    """Position among `DTYPES`."""
    width: int
    """Bits of a cell, 0 for numbers."""
    size: int
    """Elements of the server's piece of each rank."""


END = ToldTrade(-1, 0, 0, 0, 0)


class ServedGroup:
    """The process group of one lane, as a rank has it."""

    def __init__(self, group: dist.ProcessGroup, rank: int, num_ranks: int, num_servers: int) -> None:
        self._group: dist.ProcessGroup | None = group
        self._rank = rank
        self._num_ranks = num_ranks
        self._num_servers = num_servers

    def trade(self, trade: Trade, served: ServedSum) -> dist.ProcessGroup:
        """Tell the servers of a trade, in rank 0; returns the group in which it is carried out."""
        assert self._group is not None, "left"
        dtype = DTYPES.index(trade.sent.dtype)
        for index, size in enumerate(served.sizes):
            self._tell(index, ToldTrade(served.number, int(trade.is_answer), dtype, served.width, size))
        return self._group

    def leave(self) -> None:
        """Leave the group; rank 0 tells the servers that nothing follows. No collective."""
        for index in range(self._num_servers):
            self._tell(index, END)
        self._group = None

    def break_off(self) -> None:
        """Let everything that waits in the group fail, here, in the servers and in other ranks."""
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
    """Where a server finds its job of that number."""
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
