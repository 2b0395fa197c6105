"""Starts a program that dies when its parent does: `python -I -S die_with_parent.py PARENT_PID PROGRAM ARGUMENT...`.

Run as a script, not imported. It asks Linux for SIGKILL at the parent's death and becomes PROGRAM, which keeps that
wish and this pid. A `preexec_fn` would do the same, but runs Python between fork and exec of a process with threads,
where any lock may be held for ever. It costs about 15 ms at each start.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    parent, program = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before we asked
        sys.exit(1)
    os.execv(program[0], program)  # noqa: S606 - no shell is wanted
