"""Wheel and sdist as users install them: built here, and looked into."""

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from tests.test_documents import tracked
from tests.test_layout import ROOT, ROOTS


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(directory)]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    return directory


def wheel_names(built: Path) -> set[str]:
    (wheel,) = built.glob("dynamix_batch-*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_every_package_of_the_wheel_says_that_it_is_typed(built: Path) -> None:
    names = wheel_names(built)
    assert {f"dynamix/{package}/py.typed" for package in ROOTS} <= names
    assert "dynamix/trainer/attach.py" in names
    assert "dynamix/__init__.py" not in names


def test_every_file_of_the_packages_is_in_the_wheel_whatever_its_kind(built: Path) -> None:
    tops = [f"{top.relative_to(ROOT)}/" for top in ROOTS.values()]
    expected = {name.removeprefix(top) for name in tracked("") for top in tops if name.startswith(f"{top}dynamix/")}
    assert {"dynamix/cli/dashboard/page/index.html", "dynamix/runtime/die_with_parent.py"} <= expected
    assert {"dynamix/collector/ebpf/sockets.bpf.c"} <= expected
    assert expected - wheel_names(built) == set()


def test_every_scenario_is_in_the_wheel(built: Path) -> None:
    scenarios = {name for name in tracked("") if name.startswith("scenarios/")}
    assert scenarios
    assert {f"dynamix/lab/{name}" for name in scenarios} - wheel_names(built) == set()


def test_the_sdist_is_the_repository_without_what_only_our_ci_needs(built: Path) -> None:
    (archive,) = built.glob("dynamix_batch-*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {member.name.partition("/")[2] for member in opened.getmembers() if member.isfile()}
    expected = {name for name in tracked("") if not name.startswith(".ci/")}
    assert expected - names == set()
    assert {name for name in names - expected if not name.startswith(".")} <= {"PKG-INFO", *untracked()}


def untracked() -> set[str]:
    """Files that are new here and not ignored: an sdist of this moment has them."""
    listing = ["git", "ls-files", "--others", "--exclude-standard"]
    return set(subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines())


def test_the_changelog_begins_with_what_is_next_and_names_no_version_beyond_the_projects() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    first, *released = re.findall(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert first == "Unreleased"
    assert released[:1] in ([], [version])
