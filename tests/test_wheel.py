"""Wheel and sdist as users install them: built here, and looked into."""

import subprocess
import sys
import tarfile
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


def test_the_wheel_has_every_file_of_the_packages_and_every_scenario(built: Path) -> None:
    (wheel,) = built.glob("dynamix_batch-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"dynamix/{package}/py.typed" for package in ROOTS} <= names
    assert "dynamix/__init__.py" not in names
    tops = [f"{top.relative_to(ROOT)}/" for top in ROOTS.values()]
    files = {name.removeprefix(top) for name in tracked("") for top in tops if name.startswith(f"{top}dynamix/")}
    scenarios = {f"dynamix/lab/{name}" for name in tracked("") if name.startswith("scenarios/")}
    assert scenarios
    assert (files | scenarios) - names == set()


def test_the_sdist_is_the_repository_without_ci(built: Path) -> None:
    (archive,) = built.glob("dynamix_batch-*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {member.name.partition("/")[2] for member in opened.getmembers() if member.isfile()}
    assert {name for name in tracked("") if not name.startswith(".ci/")} - names == set()
