"""The command line itself: help without heavy imports, suggestions, exit codes."""

import argparse
import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
from tests.support.recordings import DEMO

from dynamix.cli import main as cli
from dynamix.cli.errors import CommandError


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A command `test` whose `run` a test may replace."""
    module = types.ModuleType(f"{cli.PACKAGE}.test", "Does as it is told.")
    module.configure = lambda parser: parser.add_argument("--number", type=int)  # type: ignore[attr-defined]
    module.run = lambda namespace: namespace.number or 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(cli, "COMMANDS", {**cli.COMMANDS, "test": "Does as it is told"})
    return module


def raising(error: BaseException) -> types.FunctionType:
    def run(_: argparse.Namespace) -> int:
        raise error

    return run


def test_help_imports_neither_torch_nor_rich_nor_the_bus_and_every_command_explains_itself_without_them() -> None:
    script = (
        "import sys; from dynamix.cli.main import command_names, main; main(['--help']);"
        "heavy = {'torch', 'rich', 'nats', 'matplotlib', 'numpy'} & set(sys.modules);"
        "sys.modules.update(rich=None, matplotlib=None, torch=None);"
        "sys.exit(f'{heavy}' if heavy else sum(main([name, '--help']) for name in command_names()))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.usefixtures("command")
def test_an_unknown_command_or_flag_gets_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["provison"]) == 2
    assert "unknown command 'provison': did you mean provision?" in capsys.readouterr().err
    assert cli.main(["test", "--number", "7"]) == 7
    assert cli.main(["test", "--number", "three"]) == cli.main(["test", "--num", "3"]) == 2
    capsys.readouterr()
    assert cli.main(["test", "--nmber", "3"]) == 2
    assert "unknown argument '--nmber': did you mean --number?" in capsys.readouterr().err


def test_a_commands_error_is_one_line_and_its_code_and_an_interrupt_ends_without_a_traceback(
    command: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    for code in (1, 2):
        command.run = raising(CommandError("no broker at nats://x: start one", exit_code=code))  # type: ignore[attr-defined]
        assert cli.main(["test"]) == code
        assert capsys.readouterr().err == "dynamix test: no broker at nats://x: start one\n"
    command.run = raising(KeyboardInterrupt())  # type: ignore[attr-defined]
    assert cli.main(["test"]) == 128 + signal.SIGINT
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("mistake", [AssertionError("ours"), ModuleNotFoundError("dynamix.no", name="dynamix.no")])
def test_our_own_mistakes_are_not_hidden(command: types.ModuleType, mistake: Exception) -> None:
    command.run = raising(mistake)  # type: ignore[attr-defined]
    with pytest.raises(type(mistake)):
        cli.main(["test"])


@pytest.mark.parametrize("arguments", ["doctor --json -", "--help"])
def test_a_reader_that_left_is_no_error(arguments: str) -> None:
    pipeline = f"{sys.executable} -m dynamix.cli.main {arguments} | true"
    done = subprocess.run(["bash", "-c", pipeline], capture_output=True, text=True, check=True)
    assert done.stderr == ""


@pytest.mark.parametrize(("arguments", "buffering"), [("--help", {}), (f"inspect {DEMO}", {"PYTHONUNBUFFERED": "1"})])
def test_a_full_standard_output_is_a_sentence_and_1(arguments: str, buffering: dict[str, str]) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"} | buffering
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "dynamix.cli.main", *arguments.split()]
        done = subprocess.run(command, env=environ, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "No space left on device" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("command", "package", "extra"),
    [("up", "structlog", "cli"), ("learn", "torch", "train"), ("export", "pyarrow.parquet", "tables")],
)
def test_a_missing_package_is_named_with_the_extra_that_brings_it(
    capsys: pytest.CaptureFixture[str], command: str, package: str, extra: str
) -> None:
    def without_it() -> int:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    assert cli.guarded(command, without_it) == 1
    assert f"pip install 'dynamix-batch[{extra}]'" in capsys.readouterr().err


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_a_stream_that_is_closed_is_no_error(closed: str) -> None:
    command = f"{sys.executable} -m dynamix.cli.main inspect {DEMO} {closed}"
    found = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert found.returncode in (0, 1)
    assert "Traceback" not in found.stdout + found.stderr
