"""Compiles and loads the programs in a process of its own, and hands their descriptors to the collector.

`python -m dynamix.collector.ebpf.loader SOCKET_FD`. BCC brings LLVM along, some 130 MB that stay with a process which
has compiled once: here they leave with it after half a second. The only module that imports bcc.
"""

import importlib.util
import os
import socket
import sys
from pathlib import Path
from typing import Any

from .program import MAPS, MAX_CLOSED, MAX_OPEN, NUM_WAYS, PROGRAMS, SOURCE
from .toolchain import Headers, find_bcc, find_headers


def main(arguments: list[str]) -> int:
    """Load, and send the descriptors of `PROGRAMS` and `MAPS`, in that order; or say on standard error why not."""
    directory, headers = find_bcc(), find_headers()
    if directory is None or headers is None:
        missing = "bcc" if directory is None else "kernel headers"
        sys.stderr.write(f"{missing} not found: `dynamix doctor` says what to install\n")
        return 1
    try:
        descriptors = load(directory, headers)
    except Exception as error:  # noqa: BLE001 - BCC raises bare ones; whatever it is, the collector does without eBPF
        sys.stderr.write(f"{error}\n")
        return 1
    with socket.socket(fileno=int(arguments[0])) as channel:
        socket.send_fds(channel, [b"\0"], descriptors)
    return 0


def load(directory: Path, headers: Headers) -> list[int]:
    """Descriptors of the loaded programs and their maps."""
    os.putenv("BCC_KERNEL_SOURCE", str(headers.source))  # BCC's library takes it from nowhere else
    bcc = _import(directory)
    include = [f"-I{path}" for path in headers.include_directories(os.uname().machine)]
    flags = [
        *include,
        f"-DMAX_OPEN={MAX_OPEN}",
        f"-DNUM_WAYS={NUM_WAYS}",
        f"-DMAX_CLOSED={MAX_CLOSED}",
        "-Wno-everything",
    ]
    compiled = bcc.BPF(src_file=str(SOURCE), cflags=flags)
    kinds = (bcc.BPF.CGROUP_SKB, bcc.BPF.SOCK_OPS)
    programs = [compiled.load_func(name, kind).fd for name, kind in zip(PROGRAMS, kinds, strict=True)]
    return [*programs, *(compiled[name].map_fd for name in MAPS)]


def _import(directory: Path) -> Any:
    """The module of that directory alone: its neighbours would hide the packages of our own environment."""
    spec = importlib.util.spec_from_file_location(
        "bcc", directory / "__init__.py", submodule_search_locations=[str(directory)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["bcc"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
