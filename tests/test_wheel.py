"""The wheel as users install it: built here, and looked into."""

import subprocess
import sys
import zipfile
from pathlib import Path

from tests.test_layout import ROOT, ROOTS


def test_every_package_of_the_wheel_says_that_it_is_typed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    (wheel,) = tmp_path.glob("dynamix_batch-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"dynamix/{package}/py.typed" for package in ROOTS} <= names
    assert "dynamix/trainer/attach.py" in names
    assert "dynamix/__init__.py" not in names
