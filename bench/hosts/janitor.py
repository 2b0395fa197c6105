"""Removes hosts when their owner is done with them, or dead: `python -m bench.hosts.janitor NAME`.

It waits for the end of its standard input, a pipe whose other end the owner alone should hold. A child that the owner
forked may hold it as well, so the owner's death is looked for too. Signals for the owner's terminal do not reach it: it
has a session of its own, and ignores those that mean to end it politely.
"""

import os
import select
import signal
import sys
from collections.abc import Sequence

from .commands import HostsError
from .names import Name
from .removal import remove


def main(arguments: Sequence[str]) -> int:
    """Wait, remove; 0 when everything is gone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    name = Name.parse(arguments[0])
    assert name is not None, arguments
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    _wait_for_the_end_of(name)
    try:
        remove(name)
    except (HostsError, OSError) as error:
        sys.stderr.write(f"the hosts {name} are not removed: {error}\n")
        return 1
    return 0


def _wait_for_the_end_of(owner: Name) -> None:
    """Until the pipe ends, or the owner."""
    try:
        process = os.pidfd_open(owner.pid)
    except ProcessLookupError:
        return
    try:
        if owner.has_living_owner():
            poll = select.poll()
            poll.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
            poll.register(process, select.POLLIN)
            poll.poll()
    finally:
        os.close(process)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
