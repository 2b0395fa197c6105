"""Where control groups of version 2 are mounted: traffic programs are attached to one of their directories."""

import re
from pathlib import Path

_ESCAPED = re.compile(r"\\([0-7]{3})")


def v2_mount(mountinfo: str) -> Path | None:
    """Mount point of the version 2 hierarchy, also beside version 1 (hybrid), by /proc/<pid>/mountinfo (proc(5))."""
    for line in mountinfo.splitlines():
        fields, _, kind = line.partition(" - ")
        if kind.startswith("cgroup2 "):
            return Path(_ESCAPED.sub(lambda octal: chr(int(octal[1], 8)), fields.split()[4]))
    return None
