"""Run a program as systemd would run a unit's, where systemd is not: its mounts, capabilities and system calls.

`run_as_unit` starts this file in a mount namespace of its own; it follows those directives of deploy/systemd that
could hinder a collector. What a directive does: systemd.exec(5).
"""

import ctypes
import errno
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

PR_SET_MDWE, MDWE_REFUSE_EXEC_GAIN = 65, 1
SCMP_ACT_ERRNO, SCMP_ACT_ALLOW = 0x0005_0000, 0x7FFF_0000
HIDDEN, READ_ONLY = "hidden", "read-only"
MOUNTS = {
    "ProtectSystem=strict": (("/", READ_ONLY),),
    "ProtectKernelModules=yes": (("/usr/lib/modules", HIDDEN), ("/lib/modules", HIDDEN)),
    "ProtectKernelTunables=yes": (("/proc/kallsyms", HIDDEN), ("/proc/sys", READ_ONLY), ("/sys", READ_ONLY)),
    "ProtectControlGroups=yes": (("/sys/fs/cgroup", READ_ONLY), ("/sys/fs/cgroup/unified", READ_ONLY)),
}


class Unit(NamedTuple):
    """What its directives come to."""

    mounts: tuple[tuple[str, str], ...]
    capabilities: tuple[str, ...]
    system_calls: tuple[str, ...]


def read_unit(*files: Path) -> Unit:
    """A unit and its drop-ins, in order: an empty value begins a new list."""
    lines = [line for file in files for line in file.read_text().splitlines() if re.match(r"\w+=", line)]
    capabilities: list[str] = []
    calls: set[str] = set()
    for name, _, value in (line.partition("=") for line in lines):
        if name == "CapabilityBoundingSet":
            capabilities = [*capabilities, *value.split()] if value else []
        elif name == "SystemCallFilter":
            named = {call for word in value.lstrip("~").split() for call in _expand(word)}
            calls = calls - named if value.startswith("~") else calls | named
    mounts = [mount for directive, those in MOUNTS.items() if directive in lines for mount in those]
    return Unit(tuple(mounts), tuple(capabilities), tuple(sorted(calls | _expand("@default"))))


def run_as_unit(unit: Unit, command: Sequence[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command inside of what a unit leaves open; needs root."""
    names = [capability.removeprefix("CAP_").lower() for capability in unit.capabilities]
    capabilities = ",".join(["-all", *(f"+{name}" for name in names)])
    with tempfile.TemporaryDirectory() as nothing:
        Path(nothing).chmod(0)
        mounts = [f"{kind}:{path}" for path, kind in unit.mounts]
        closed = ["setpriv", "--no-new-privs", f"--inh-caps={capabilities}", f"--bounding-set={capabilities}"]
        this = [sys.executable, __file__]
        inner = [*closed, *this, "filter", ",".join(unit.system_calls), *command]
        outer = ["unshare", "--mount", "--propagation", "private", *this, "mount", ",".join(mounts), nothing, *inner]
        return subprocess.run(outer, cwd=cwd, capture_output=True, text=True, check=False)


def _expand(word: str) -> set[str]:
    """The system calls of a word: itself, or a group of systemd's."""
    if not word.startswith("@"):
        return {word}
    listed = subprocess.run(["systemd-analyze", "syscall-filter", word], capture_output=True, text=True, check=True)
    members = [line.strip() for line in listed.stdout.splitlines()[1:]]
    return {call for member in members if member and not member.startswith("#") for call in _expand(member)}


def _mount(mounts: str, nothing: str) -> None:
    for kind, path in (mount.split(":", 1) for mount in mounts.split(",")):
        if kind == HIDDEN and Path(path).exists():
            source = nothing if Path(path).is_dir() else "/dev/null"
            subprocess.run(["mount", "--bind", source, path], check=True)
        elif Path(path).exists():
            if not Path(path).is_mount():
                subprocess.run(["mount", "--bind", path, path], check=True)
            subprocess.run(["mount", "--options", "remount,bind,ro", path], check=True)


def _filter(calls: Sequence[str]) -> None:
    """Refuse every other system call, and memory that becomes executable, from here on."""
    seccomp = ctypes.CDLL("libseccomp.so.2")
    seccomp.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(seccomp.seccomp_init(SCMP_ACT_ERRNO | errno.EPERM))
    for call in calls:
        number = seccomp.seccomp_syscall_resolve_name(call.encode())
        if number >= 0:  # some are another architecture's
            seccomp.seccomp_rule_add_array(context, SCMP_ACT_ALLOW, number, 0, None)
    ctypes.CDLL(None).prctl(PR_SET_MDWE, MDWE_REFUSE_EXEC_GAIN, 0, 0, 0)  # since Linux 6.3
    if seccomp.seccomp_load(context) != 0:
        raise OSError("cannot load the filter of system calls")


def main(arguments: list[str]) -> None:
    """One layer, then the next program in its place."""
    layer, given, *rest = arguments
    if layer == "mount":
        nothing, *rest = rest
        _mount(given, nothing)
    else:
        _filter(given.split(","))
    os.execvp(rest[0], rest)


if __name__ == "__main__":
    main(sys.argv[1:])
