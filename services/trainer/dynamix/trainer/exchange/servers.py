"""Gradient servers: processes without a model that sum parts of the gradients of a job, and know nothing else of it.

Rank 0 announces a job at the servers' addresses; ranks and servers then make process groups. One thread per group does
what rank 0 tells it: pieces may come in either lane, sums go back in the second one. A thread waits for rank 0 without
limit, since ranks may compute, evaluate or save; the end of a rank's process ends its connections. A server serves one
job after the other, and keeps nothing of a sum. `GradientServers` is the side of the ranks.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple, cast

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore  # public, missing in the stubs of dist

from dynamix.trainer.exchange.codec import Trade, sum_in_rank_order
from dynamix.trainer.exchange.transport import LentTensor, break_group, perform

NUM_GROUPS = 2
"""Process groups: one for each thread of the ranks' pipeline."""
TELL_TAG = 1
REACH_S = 10.0
"""Longest wait for a server's address to answer."""
MEETING_S = 60.0
"""Longest wait for the servers to join: one that serves another job does not."""
LOOK_S = 0.2
"""Between two looks for another job: the store has no way to be told of one."""
DEFAULT_TIMEOUT = timedelta(minutes=30)
"""Torch's own, for gloo."""
FOR_EVER = timedelta(days=365)
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
    """Index of the server that reads it."""
    meeting: str
    """Address of the store at which all meet."""
    number: int
    """Index of the job at that store."""
    timeout_s: float
    """Time-out of the process groups."""


class ToldTrade(NamedTuple):
    """Message to a server before an exchange: its size and type."""

    number: int
    """Index of the sum that it belongs to; -1: no more trades in this group."""
    is_answer: int
    dtype: int
    """Position among `DTYPES`."""
    size: int
    """Elements of the server's piece of each rank."""


END = ToldTrade(-1, 0, 0, 0)


class ServedGroup(NamedTuple):
    """The process group of one thread, in a rank."""

    group: dist.ProcessGroup
    rank: int
    num_ranks: int
    num_servers: int

    def trade(self, trade: Trade) -> dist.ProcessGroup:
        """Announce an exchange to the servers, in rank 0; returns the group in which it is carried out."""
        dtype = DTYPES.index(trade.sent.dtype)
        for index, size in enumerate(trade.served_sizes):
            self._tell(index, ToldTrade(trade.served_sum, int(trade.is_answer), dtype, size))
        return self.group

    def leave(self) -> None:
        """Tell the servers, in rank 0, that nothing follows. No collective."""
        for index in range(self.num_servers):
            self._tell(index, END)

    def _tell(self, index: int, told: ToldTrade) -> None:
        if self.rank == 0:
            lent = LentTensor(torch.tensor(told))
            self.group.send([lent.alias], self.num_ranks + index, TELL_TAG).wait()


class GradientServers(NamedTuple):
    """The servers of a job, none or several, and the ranks that meet them."""

    addresses: Sequence[str]
    job: str
    rank: int
    num_ranks: int

    def join(self, group: dist.ProcessGroup, timeout: timedelta | None) -> list[ServedGroup]:
        """Announce the job to every server, and make the groups with them; a collective of the ranks of `group`.

        Raises:
            RuntimeError: on all ranks, when a server cannot be reached or does not join.
        """
        named, problem = f"the gradient servers {', '.join(self.addresses)}", ""
        number = LentTensor(torch.zeros(1, dtype=torch.int64))  # at the first server, from 1; 0 if one is not reached
        if self.rank == 0:
            try:
                stores = [open_store(address) for address in self.addresses]
                numbers = [store.add(JOBS_KEY, 1) for store in stores]
                for index, store in enumerate(stores):
                    announcement = JobAnnouncement(
                        job=self.job,
                        num_ranks=self.num_ranks,
                        num_servers=len(stores),
                        index=index,
                        meeting=self.addresses[0],
                        number=numbers[0],
                        timeout_s=(timeout or DEFAULT_TIMEOUT).total_seconds(),
                    )
                    store.set(job_key(numbers[index]), msgspec.json.encode(announcement).decode())
                number.tensor.fill_(numbers[0])
            except RuntimeError as error:
                problem = f": {error}"
        group.broadcast(number.alias, 0).wait()
        if not number.tensor.item():
            raise RuntimeError(
                f"{named} cannot all be reached{problem}; start `dynamix serve-gradients` at each address"
            )
        try:
            store, size = open_store(self.addresses[0]), self.num_ranks + len(self.addresses)
            groups = make_groups(store, int(number.tensor.item()), self.rank, size, timeout or DEFAULT_TIMEOUT)
        except RuntimeError as error:
            raise RuntimeError(
                f"{named} do not join within {MEETING_S:g} s: {error}; each serves one job at a time, and must reach "
                "the first one's address and all ranks"
            ) from error
        return [ServedGroup(each, self.rank, self.num_ranks, len(self.addresses)) for each in groups]


def job_key(number: int) -> str:
    """Key in the store under which a server finds a job."""
    return f"job/{number}"


def split_address(address: str) -> tuple[str, int]:
    """Host and port of a server. Raises ValueError for anything but HOST:PORT."""
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


@dataclass(eq=False)
class ServedJob:
    """One job in a server, from its first exchange to its last."""

    groups: list[dist.ProcessGroup]
    num_ranks: int
    num_servers: int
    problem: str = ""
    """The error that ended the job early."""
    _changed: threading.Condition = field(default_factory=threading.Condition)
    """Guards all that follows, and the problem."""
    _totals: dict[int, Tensor] = field(default_factory=dict)
    """Sums until the ranks take them back, by number."""
    _left: int = 0
    _is_broken: bool = False

    def __post_init__(self) -> None:
        """Start a thread for each group: daemons, since one that waits for a vanished host would keep the process."""
        self._left = len(self.groups)
        for number, group in enumerate(self.groups):
            name = f"dynamix server lane {number}"
            threading.Thread(target=self._run, args=(group,), name=name, daemon=True).start()

    def wait(self, timeout_s: float) -> bool:
        """Whether the job has ended, by then at the latest."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._left, timeout_s)

    def break_off(self, problem: str) -> None:
        """End the job here: nothing waits for it any more, in no process."""
        with self._changed:
            self.problem = self.problem or problem
            self._is_broken = True
            self._changed.notify_all()
        for group in self.groups:
            break_group(group)

    def _run(self, group: dist.ProcessGroup) -> None:
        try:
            while True:
                lent = LentTensor(torch.empty(len(END), dtype=torch.int64))
                group.recv([lent.alias], 0, TELL_TAG).wait(FOR_EVER)
                told = ToldTrade(*lent.tensor.tolist())
                if told == END:
                    break
                self._take_part(told, group)
        except Exception as error:  # noqa: BLE001 - reported by the server, which goes on with the next job
            self.break_off(str(error))
        with self._changed:
            self._left -= 1
            self._changed.notify_all()

    def _take_part(self, told: ToldTrade, group: dist.ProcessGroup) -> None:
        nothing = torch.empty(0, dtype=DTYPES[told.dtype])
        from_ranks = [*[told.size] * self.num_ranks, *[0] * self.num_servers]
        no_sizes = [0] * len(from_ranks)
        if told.is_answer:
            with self._changed:
                self._changed.wait_for(lambda: told.number in self._totals or self._is_broken)
                if told.number not in self._totals:
                    raise RuntimeError("the other lane has failed")
                total = self._totals.pop(told.number)
            perform(Trade(nothing, total.repeat(self.num_ranks), no_sizes, from_ranks), group)
            return
        pieces = torch.empty(told.size * self.num_ranks, dtype=nothing.dtype)
        perform(Trade(pieces, nothing, from_ranks, no_sizes), group)
        total = sum_in_rank_order(list(torch.split(pieces, from_ranks[: self.num_ranks])))
        with self._changed:
            self._totals[told.number] = total
            self._changed.notify_all()


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
            if (found := self._announcement(number)) is not None:
                number += 1
                self._serve(found, number, stop)
            else:
                stop.wait(LOOK_S)

    def _announcement(self, number: int) -> JobAnnouncement | None:
        """The job that was announced under a number; `None` if none was yet."""
        if not self._store.check([job_key(number)]):
            return None
        return msgspec.json.decode(self._store.get(job_key(number)), type=JobAnnouncement)

    def _serve(self, found: JobAnnouncement, following: int, stop: threading.Event) -> None:
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
            later = self._announcement(following)
            if later is not None and later.job == found.job:  # the hosts of its earlier start have vanished
                job.break_off("it starts again")
                self._say(f"{found.job}: starts again before it has ended")
                return
        self._say(f"{found.job}: ended" + (f" early: {job.problem}" if job.problem else ""))
