"""Becomes a program in other cgroups: `python -I -S enter.py CGROUP_PROCS[:CGROUP_PROCS] PROGRAM ARGUMENT...`.

Run as a script, not imported. The pid stays, and with it the wish to die with the parent.
"""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    for procs in sys.argv[1].split(":"):
        Path(procs).write_text("0")  # this process
    os.execvp(sys.argv[2], sys.argv[2:])
