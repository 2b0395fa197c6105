"""The tree of debian:bookworm-slim, made of Debian's archive by debootstrap: the smallest system without documents."""

import shutil
import subprocess
from pathlib import Path

LEFT_OUT = (
    "usr/share/doc",
    "usr/share/man",
    "usr/share/locale",
    "usr/share/info",
    "var/lib/apt/lists",
    "var/cache/apt",
)
EXCLUDED = "".join(f"path-exclude /{path}/*\n" for path in LEFT_OUT[:4])


class BaseError(RuntimeError):
    """The base cannot be made here; the text says what is missing."""


def make_base(directory: Path, suite: str = "bookworm") -> None:
    """Make it in a directory, once: a finished one is taken as it is. Needs root and debootstrap; 200 MB of packages.

    Raises:
        BaseError: where debootstrap is missing or fails.
    """
    if (directory / "etc/dpkg/dpkg.cfg.d/docker").exists():
        return
    if shutil.which("debootstrap") is None:
        raise BaseError("debootstrap is missing: apt-get install debootstrap")
    shutil.rmtree(directory, ignore_errors=True)
    # in a mount namespace of its own: /proc, which it mounts into the tree, is gone with it
    command = [
        "unshare",
        "--mount",
        "--propagation",
        "private",
        "debootstrap",
        "--variant=minbase",
        suite,
        str(directory),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BaseError(f"debootstrap failed: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    for path in LEFT_OUT:
        for entry in (directory / path).iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    (directory / "etc/dpkg/dpkg.cfg.d/docker").write_text(EXCLUDED)  # also for packages that a stage installs
