"""Where headers, BCC and control groups are found, on the layouts of several distributions."""

import errno
import os
from pathlib import Path

import pytest

from dynamix.collector.ebpf import loader
from dynamix.collector.ebpf.loader import Headers, find_bcc, find_headers
from dynamix.collector.ebpf.probe import open_probe, v2_mount
from dynamix.collector.ebpf.syscall import ProbeError

SYSTEM = os.uname_result(("Linux", "host", "6.1.0-30-amd64", "#1", "x86_64"))


def build_tree(directory: Path, *, sources: bool = True, architecture: str = "x86") -> Path:
    (directory / "include/generated").mkdir(parents=True)
    (directory / "include/generated/autoconf.h").touch()
    (directory / "arch" / architecture).mkdir(parents=True)
    if sources:
        (directory / "include/linux").mkdir()
    return directory


def test_the_running_kernels_headers_come_first(tmp_path: Path) -> None:
    own = build_tree(tmp_path / "usr/src/linux-headers-6.1.0-30")
    build_tree(tmp_path / "usr/src/linux-headers-6.12.0")
    modules = tmp_path / "lib/modules" / SYSTEM.release
    modules.mkdir(parents=True)
    (modules / "build").symlink_to(own)
    assert find_headers(tmp_path, SYSTEM) == Headers(own, own, own=True)


def test_debian_keeps_sources_apart_from_what_the_build_generated(tmp_path: Path) -> None:
    build = build_tree(tmp_path / "usr/src/linux-headers-6.1.0-56-amd64", sources=False)
    common = tmp_path / "usr/src/linux-headers-6.1.0-56-common"
    (common / "include/linux").mkdir(parents=True)
    found = find_headers(tmp_path, SYSTEM)
    assert found == Headers(common, build, own=False)
    assert build / "arch/x86/include/generated/uapi" in found.include_directories("x86_64")


def test_of_other_kernels_headers_the_newest_of_this_architecture_are_taken(tmp_path: Path) -> None:
    build_tree(tmp_path / "usr/src/linux-headers-6.9.0")
    newest = build_tree(tmp_path / "usr/src/kernels/6.12.5-200.fc41.x86_64")
    build_tree(tmp_path / "usr/src/linux-headers-6.14.0-arm64", architecture="arm64")
    build_tree(tmp_path / "usr/src/linux-headers-6.15.0-amd64", sources=False)  # the sources are not installed
    assert find_headers(tmp_path, SYSTEM) == Headers(newest, newest, own=False)


PURE = "30 24 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
HYBRID = (
    "31 24 0:27 / /sys/fs/cgroup ro - tmpfs tmpfs ro\n"
    "32 31 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
    "33 31 0:29 / /sys/fs/cgroup/with\\040space rw shared:9 - cgroup2 cgroup2 rw\n"
)


@pytest.mark.parametrize(
    ("mountinfo", "directory"),
    [(PURE, "/sys/fs/cgroup"), (HYBRID, "/sys/fs/cgroup/with space"), (HYBRID.replace("cgroup2", "cgroup"), None)],
)
def test_the_mount_of_version_2_is_found_alone_and_beside_version_1(mountinfo: str, directory: str | None) -> None:
    assert v2_mount(mountinfo) == (None if directory is None else Path(directory))


def test_bcc_is_not_confused_with_the_pypi_package_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    namesake, distribution = tmp_path / "environment/bcc", tmp_path / "distribution/bcc"
    for directory in (namesake, distribution):
        directory.mkdir(parents=True)
        (directory / "__init__.py").touch()
    (distribution / "libbcc.py").touch()
    monkeypatch.syspath_prepend(namesake.parent)
    monkeypatch.setattr(loader, "DISTRIBUTION_DIRECTORIES", (distribution,))
    assert find_bcc() == distribution
    monkeypatch.setattr(loader, "DISTRIBUTION_DIRECTORIES", (namesake,))
    assert find_bcc() != namesake


def test_a_probe_that_cannot_open_gives_the_reason_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/somewhere/cgroup.procs")

    monkeypatch.setattr(Path, "is_file", refused)
    with pytest.raises(ProbeError, match=r"/somewhere/cgroup\.procs: Permission denied"):
        open_probe("/somewhere")
