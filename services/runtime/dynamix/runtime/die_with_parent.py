"""Ends a process when its parent ends: a worker process by `begin_worker`, a program by this file run as a script.

`python -I -S die_with_parent.py PARENT_PID PROGRAM ARGUMENT...` asks Linux for SIGKILL at the parent's death and
becomes PROGRAM, which keeps that request and this pid. A `preexec_fn` would do the same, but runs Python between fork
and exec of a process with threads, where any lock may be held for ever. It costs about 15 ms at each start.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent`, the process that started it, ends; or end now if it has."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)


def parent_of(process: int) -> int:
    """The id of a process's parent; 0 when it has ended, or where there is no /proc."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:  # noqa: PTH123 - pathlib would double the time of a start
            return int(file.read().rpartition(b")")[2].split()[1])
    except OSError:
        return 0


def begin_worker(parent: int) -> None:
    """Prepare a worker process, for example as a pool's initializer: interrupts are its parent's, as is its end.

    A pool's workers wait on a pipe that they themselves hold open: without this they would outlive a killed parent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(parent)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    program = sys.argv[2:]
    os.execv(program[0], program)  # noqa: S606 - no shell is wanted
