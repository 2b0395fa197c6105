"""Compiles and loads the programs in a process of its own, and hands their descriptors to the collector.

`python -m dynamix.collector.ebpf.loader SOCKET_FD`. BCC brings LLVM along, some 130 MB that stay with a process which
has compiled once: here they leave with it after half a second. The only module that imports bcc. It takes BCC's Python
module and kernel headers, wherever the distribution installed them.
"""

import importlib.util
import os
import re
import socket
import sys
from pathlib import Path
from typing import NamedTuple

from .probe import MAPS, MAX_CLOSED, MAX_OPEN, NUM_WAYS, PROGRAMS, SOURCE

ARCHITECTURES = {"x86_64": "x86", "aarch64": "arm64", "ppc64le": "powerpc", "s390x": "s390", "riscv64": "riscv"}
"""Names of architectures in the kernel's sources, by uname's."""
_GENERATED = Path("include/generated/autoconf.h")
DISTRIBUTION_DIRECTORIES = (
    Path("/usr/lib/python3/dist-packages/bcc"),
    Path("/usr/lib/python3/site-packages/bcc"),
)
_PART = "libbcc.py"
"""PyPI has a `bcc` too, about lattices: it lacks this."""


class Headers(NamedTuple):
    """A tree of headers; some distributions keep what the build generated apart from the sources."""

    source: Path
    build: Path
    own: bool
    """Whether they are the running kernel's."""

    def include_directories(self, machine: str) -> list[Path]:
        """Directory of generated headers; BCC finds those of the sources itself."""
        architecture = self.build / "arch" / ARCHITECTURES.get(machine, machine) / "include"
        return [
            self.build / "include",
            self.build / "include/generated/uapi",
            architecture / "generated",
            architecture / "generated/uapi",
        ]


def main(arguments: list[str]) -> int:
    """Load, and send the descriptors of `PROGRAMS` and `MAPS`, in that order; or print the reason on standard error."""
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
    # that directory's module alone: its neighbours would hide the packages of our own environment
    spec = importlib.util.spec_from_file_location(
        "bcc", directory / "__init__.py", submodule_search_locations=[str(directory)]
    )
    assert spec is not None
    assert spec.loader is not None
    bcc = sys.modules["bcc"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bcc)
    flags = [f"-I{path}" for path in headers.include_directories(os.uname().machine)]
    flags += [f"-DMAX_OPEN={MAX_OPEN}", f"-DNUM_WAYS={NUM_WAYS}", f"-DMAX_CLOSED={MAX_CLOSED}", "-Wno-everything"]
    compiled = bcc.BPF(src_file=str(SOURCE), cflags=flags)
    kinds = (bcc.BPF.CGROUP_SKB, bcc.BPF.SOCK_OPS)
    programs = [compiled.load_func(name, kind).fd for name, kind in zip(PROGRAMS, kinds, strict=True)]
    return [*programs, *(compiled[name].map_fd for name in MAPS)]


def find_bcc() -> Path | None:
    """The directory of BCC's Python module, as the distribution installed it or else in this environment."""
    spec = importlib.util.find_spec("bcc")
    visible = [] if spec is None else [Path(path) for path in spec.submodule_search_locations or ()]
    fedora = sorted(Path("/usr/lib").glob("python3.*/site-packages/bcc"), reverse=True)
    found = (path for path in (*DISTRIBUTION_DIRECTORIES, *fedora, *visible) if (path / _PART).is_file())
    return next(found, None)


def find_headers(root: Path = Path("/"), system: os.uname_result | None = None) -> Headers | None:
    """The running kernel's headers, or else the newest of the same architecture, or `None`.

    Our programs use UAPI structures only, which never change: any kernel's headers will do.
    """

    def version(path: Path) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", path.name)]

    system = system or os.uname()
    own = _tree(root / "lib/modules" / system.release / "build", system.machine)
    installed = [*(root / "usr/src").glob("linux-headers-*"), *(root / "usr/src/kernels").glob("*")]
    others = (_tree(path, system.machine) for path in sorted(installed, key=version, reverse=True))
    found = own or next(filter(None, others), None)
    return None if found is None else Headers(*found, own=own is not None)


def _tree(build: Path, machine: str) -> tuple[Path, Path] | None:
    """Sources and build directory, when there are both; Debian links nothing between the two but by name."""
    build = build.resolve()
    architecture = build / "arch" / ARCHITECTURES.get(machine, machine)
    try:
        if not (build / _GENERATED).is_file() or not architecture.is_dir():
            return None
    except PermissionError:  # systemd's ProtectKernelModules closes /lib/modules; those in /usr/src will do
        return None
    common = build.with_name(build.name.rpartition("-")[0] + "-common")
    source = next((path for path in (build, common) if (path / "include/linux").is_dir()), None)
    return None if source is None else (source, build)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
