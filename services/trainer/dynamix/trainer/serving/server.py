"""The server process: waits at its address for a job, serves it to its end, and waits for the next one."""

import threading
from collections.abc import Callable
from datetime import timedelta

import msgspec
from torch._C._distributed_c10d import TCPStore  # public, missing in the stubs of torch.distributed

from dynamix.trainer.communication.gradient_servers import JobAnnouncement, job_key, make_groups, open_store

from .lanes import ServedJob

LOOK_S = 0.2
"""Between two looks for another job: the store has no way to be told of one."""


class GradientServer:
    """Serves one job after the other."""

    def __init__(self, port: int, say: Callable[[str], None]) -> None:
        """Listen on a port of all addresses, 0 for a free one; `say` gets a line for each job that begins or ends.

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
        """Whether the same job is announced again: then the hosts of its earlier start have vanished."""
        return bool(self._store.check([job_key(number)])) and self._announcement(number).job == job
