"""The shape of the command line: every command alike, rooms without a terminal, rich and matplotlib in views only."""

import ast
import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamix.cli.main import COMMANDS, PACKAGE, summary

CLI = Path(__file__).parents[2] / "cli" / "dynamix" / "cli"
FOLDERS = tuple(name.replace("-", "_") for name in COMMANDS)
"""The commands' folders: a module's name has no '-'."""
ROOMS = ("board", "dashboard", "inspection")
"""What other displays than the terminal use."""
DRAWING = ("rich", "matplotlib")


def imported(path: Path) -> Iterator[str]:
    """Absolute names of the modules that a file imports, at its top or in a function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = ".".join(path.relative_to(CLI.parents[1]).parts[: -node.level]) if node.level else ""
            yield f"{package}.{node.module or ''}".strip(".")


def commands_of(path: Path) -> Iterator[str]:
    """The commands' folders that a file imports from."""
    for one in imported(path):
        inside = one.removeprefix(f"{PACKAGE}.").split(".")[0]
        if one.startswith(f"{PACKAGE}.") and inside in FOLDERS:
            yield inside


def is_view(path: Path) -> bool:
    return path.stem in ("view", "figure") or path.parent.name == "view"


def test_every_folder_of_commands_is_a_command() -> None:
    folders = {path.name for path in (CLI / "commands").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == set(FOLDERS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_summary_of_one_line(name: str) -> None:
    assert 10 < len(summary(name)) <= 100


@pytest.mark.parametrize("name", FOLDERS)
def test_every_command_offers_configure_and_run(name: str) -> None:
    module = importlib.import_module(f"{PACKAGE}.{name}.command")
    assert module.__doc__
    assert list(inspect.signature(module.configure).parameters) == ["parser"]
    signature = inspect.signature(module.run)
    assert (list(signature.parameters), signature.return_annotation) == (["arguments"], int)


def test_rich_and_matplotlib_are_imported_by_views_only() -> None:
    shared = {CLI / "tables.py", CLI / "figures.py"}
    for path in set(CLI.rglob("*.py")) - shared:
        drawing = [name for name in imported(path) if name.split(".")[0] in DRAWING]
        assert drawing == [] or is_view(path), f"{path} imports {drawing}"


def test_commands_can_be_imported_without_rich_matplotlib_and_torch() -> None:
    script = (
        "import importlib, sys; sys.modules.update(rich=None, matplotlib=None, torch=None);"
        f"[importlib.import_module(f'{PACKAGE}.{{name}}.command') for name in {FOLDERS!r}]"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", FOLDERS)
def test_commands_never_import_each_other(name: str) -> None:
    for path in (CLI / "commands" / name).rglob("*.py"):
        others = sorted(set(commands_of(path)) - {name})
        assert others == [], f"{path} imports the commands {others}"


def test_what_commands_share_imports_no_command() -> None:
    for path in (CLI / "commands").glob("*.py"):
        assert list(commands_of(path)) == [], path


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_compute_without_a_terminal(room: str) -> None:
    for path in (CLI / room).glob("*.py"):
        outside = [
            name for name in imported(path) if name.split(".")[0] in DRAWING or name.startswith("dynamix.cli.commands")
        ]
        assert outside == [], f"{path} imports {outside}"
        calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        assert not any(isinstance(call, ast.Name) and call.id == "print" for call in calls), f"{path} prints"


def test_no_folder_has_more_than_fourteen_modules() -> None:
    folders = {path.parent for path in CLI.rglob("*.py")}
    assert [folder for folder in folders if len(list(folder.glob("*.py"))) > 14] == []
