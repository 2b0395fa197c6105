"""Wheel and sdist as users install them: built here, and looked into."""

import importlib.metadata
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
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


TRAINING = """
import sys
sys.modules.update(dict.fromkeys(sys.argv[1].split(",")))  # as if they were not installed
import threading
import torch
from dynamix.trainer import attach

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
dataset = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
with attach(model, optimizer, dataset, local_batch_size=8) as session:
    for inputs, targets in session.loader:
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.step(loss)
    print(session.step_index, threading.active_count(), "nats" in sys.modules)
import dynamix.trainer.bus_client.client
import dynamix.cli.commands.train
"""


def test_training_needs_no_package_of_the_services_and_without_a_broker_no_nats_thread_or_warning() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    of_services = {canonicalize_name(Requirement(each).name) for each in (*extras["services"], *extras["cli"])}
    installed = importlib.metadata.packages_distributions()
    modules = [module for module, found in installed.items() if of_services & {*map(canonicalize_name, found)}]
    assert {"structlog", "nacl", "rich"} <= {*modules}
    done = subprocess.run(
        [sys.executable, "-c", TRAINING, ",".join(modules)],
        env={name: value for name, value in os.environ.items() if not name.startswith("DYNAMIX_")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("8 1 False\n", "")
