"""The three programs that hosts are made with: `ip` and `tc` (iproute2), `nsenter` (util-linux)."""

import os
import shutil
import subprocess

PACKAGES = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux"}
TIMEOUT_S = 20.0


class HostsError(RuntimeError):
    """Hosts could not be made, changed or removed; the text says what is missing and how to fix it."""


def check_requirements() -> None:
    """Make sure that this process may make hosts.

    Raises:
        HostsError: naming what is missing.
    """
    if os.geteuid() != 0:
        raise HostsError(
            f"hosts are made of network namespaces and cgroups, for which one must be root, not uid {os.geteuid()}: "
            "use sudo, or a container with --privileged"
        )
    for program in PACKAGES:
        program_path(program)


def program_path(program: str) -> str:
    """Where a program is.

    Raises:
        HostsError: when it is nowhere.
    """
    if found := shutil.which(program):
        return found
    raise HostsError(f"no {program} on PATH: apt-get install {PACKAGES[program]}")


def run(*command: str) -> str:
    """Run a program; returns what it said.

    Raises:
        HostsError: when it fails, with its own words.
    """
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HostsError(f"{' '.join(command)}: {error}") from error
    if done.returncode:
        hint = ": the capabilities CAP_NET_ADMIN and CAP_SYS_ADMIN are needed" if "permitted" in done.stderr else ""
        raise HostsError(f"{' '.join(command)} failed: {done.stderr.strip()}{hint}")
    return done.stdout
