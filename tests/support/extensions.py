"""Packages of other people for tests: the example package, installed, and fake ones with nothing but entry points."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parent / "extension_package"
MODULE = "example_extension"


def install_example(target: Path) -> Path:
    """Install the example package into a folder with pip, offline, and return the folder."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run(
        [*pip, "--disable-pip-version-check", "--root-user-action=ignore", "--target", str(target), str(EXAMPLE)],
        check=True,
    )
    return target


def register(folder: Path, package: str, group: str, **entries: str) -> None:
    """Make a distribution that registers `entries` (name=module:object) and holds nothing else."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in entries.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))


@pytest.fixture(scope="session")
def _example_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_example(tmp_path_factory.mktemp("installed"))


@pytest.fixture
def example_extension(_example_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder with the example package, on the path of this process."""
    monkeypatch.syspath_prepend(_example_folder)
    yield _example_folder
    for name in [name for name in sys.modules if name.split(".")[0] == MODULE]:
        del sys.modules[name]
