"""The first thing that a worker process does: it leaves interrupts to its parent, and dies with it."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def begin(parent: int) -> None:
    """Prepare this process, started by process `parent`; to be called in it, for example as a pool's initializer.

    A pool's workers wait on a pipe that they themselves hold open: without this they would outlive a killed parent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)
