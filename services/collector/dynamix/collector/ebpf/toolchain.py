"""What compiling takes: BCC's Python module and kernel headers, wherever the distribution installed them."""

import importlib.util
import os
import re
from pathlib import Path
from typing import NamedTuple

ARCHITECTURES = {"x86_64": "x86", "aarch64": "arm64", "ppc64le": "powerpc", "s390x": "s390", "riscv64": "riscv"}
"""The kernel's own names, by what uname says."""
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
        """Where generated headers are; BCC finds those of the sources itself."""
        architecture = self.build / "arch" / ARCHITECTURES.get(machine, machine) / "include"
        return [
            self.build / "include",
            self.build / "include/generated/uapi",
            architecture / "generated",
            architecture / "generated/uapi",
        ]


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
    system = system or os.uname()
    own = _tree(root / "lib/modules" / system.release / "build", system.machine)
    if own is not None:
        return Headers(*own, own=True)
    installed = [*(root / "usr/src").glob("linux-headers-*"), *(root / "usr/src/kernels").glob("*")]
    trees = (_tree(path, system.machine) for path in sorted(installed, key=_version, reverse=True))
    found = next((tree for tree in trees if tree is not None), None)
    return None if found is None else Headers(*found, own=False)


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


def _version(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", path.name)]
