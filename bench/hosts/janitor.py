"""Removes hosts when their owner is done with them, or dead: `python -m bench.hosts.janitor NAME`.

It waits for the end of its standard input, a pipe whose other end the owner alone should hold. A child that the owner
forked may hold it as well, so the owner's death is looked for too. Signals for the owner's terminal do not reach it: it
has a session of its own, and ignores those that mean to end it politely.
"""

import signal
import sys
from collections.abc import Sequence

from .namespace import HostsError
from .removal import Name, remove


def main(arguments: Sequence[str]) -> int:
    """Wait, remove; 0 when everything is gone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    name = Name.parse(arguments[0])
    assert name is not None, arguments
    print("ready", flush=True)
    name.wait_for_owner(sys.stdin.fileno())
    try:
        remove(name)
    except (HostsError, OSError) as error:
        sys.stderr.write(f"the hosts {name} are not removed: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
