"""What cannot be typed: one sentence before any work, a code that is not 0, no traceback, and no file touched."""

import argparse
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.devices import device_in, identity

from dynamix.cli.arguments import OutputPath
from dynamix.cli.main import Parser, command_module, command_names, main

DEMO = Path(__file__).parents[1] / "data" / "demo.dxc"
FOREIGN = b"import os\n\nprint('hours of work')\n"
REFUSED = [
    ("demo --target nan", "demo: argument --target: nan: it must be a number above 0 and at most 1"),
    ("up --port 99999", "up: argument --port: 99999: it must be 0 to 65535"),
    ("up --port 5000 --metrics-port 5000", "--metrics-port: 5000 is the broker's own port"),
    ("train --name mnist", "put torchrun's options, the script and its arguments behind --"),
    ("capture job", "the following arguments are required: -o/--output"),
    ("capture mnist/1 -o x.dxc", "'mnist/1' names no job: use 1 to 63 of the characters a-z, 0-9 and '-'"),
    ("capture job -o -", "'-' does not stand for standard output here: name a file"),
    (f"replay {DEMO} --policy-file /none", "cannot read the policy file /none"),
    ("simulate nowhere", "scenario 'nowhere' is neither a file nor among those that are shipped: heldout/adam, "),
    ("simulate train/mixed-8 --policy oracle", "'oracle' stands for several runs: use `dynamix evaluate"),
    ("learn --set clip_coeff=0.1", "there is no such setting: did you mean clip_coef?"),
    ("learn --set num_updates=0", "num_updates=0: Expected `int` >= 1"),
    ("learn --policy rule", "'rule' is the name of a policy in code: give the learned one another name"),
    ("evaluate --tuned /none.toml", "/none.toml: No such file or directory; tune the baselines"),
    ("policy show ppo:0", "a version is an integer from 1, as in ppo:3"),
    (f"dashboard {DEMO} --token-file /none", "cannot read /none: No such file or directory"),
    (f"dashboard {DEMO} --host 192.0.2.1", "cannot listen on 192.0.2.1:8650"),
    ("export Mnist", "'Mnist' names no job: use 1 to 63 of the characters a-z, 0-9 and '-'; nor is there a file Mnist"),
    (f"export {DEMO} -o job.xlsx", "job.xlsx: its ending names no format: choose one with --format"),
    (f"export {DEMO} --format parquet", "Parquet is not text: name a file with -o FILE"),
    ("calibrate x --workload w -o My.toml", "the scenario gets the name of the file"),
]


@pytest.mark.parametrize(("words", "sentence"), REFUSED, ids=[words[:40] for words, _ in REFUSED])
def test_a_bad_value_is_one_sentence_and_touches_nothing(
    words: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("DYNAMIX_NATS_URL", "nats://127.0.0.1:1")  # no broker
    assert main(words.split()) in (1, 2)
    said = capsys.readouterr().err
    assert sentence in said
    shown = [line for line in said.splitlines() if not line.startswith(("Try '", "captured by", "  ", "replaying"))]
    assert len(shown) == 1
    assert list(tmp_path.iterdir()) == []


# --- files


def actions_of(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for one in action.choices.values():
                yield from actions_of(one)


@pytest.mark.parametrize("name", command_names())
def test_every_output_file_is_declared_by_the_shared_type(name: str) -> None:
    """The tests below hold for all of them."""
    parser = Parser(prog=name)
    command_module(name).configure(parser)
    for action in actions_of(parser):
        if {"--json", "--png", "--output", "--results"}.intersection(action.option_strings):
            assert callable(action.type)
            assert isinstance(action.type("file"), OutputPath)


def test_two_outputs_are_never_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert main(["evaluate", "--results", str(tmp_path / "file"), "--json", str(tmp_path / "link")]) == 2
    assert "is named for two outputs" in capsys.readouterr().err
    assert not (tmp_path / "file").exists()


def test_files_that_are_not_named_are_checked_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, words in (
        ("dynamix-demo.png", ["demo"]),
        ("ppo-0.safetensors", ["learn"]),
        ("ppo-0.safetensors.checkpoint", ["learn"]),
        ("dynamix-evaluate.jsonl", ["evaluate"]),
    ):
        (tmp_path / name).write_bytes(FOREIGN)
        assert main(words) == 2
        assert f"{name} exists and is not a" in capsys.readouterr().err
        assert (tmp_path / name).read_bytes() == FOREIGN
        (tmp_path / name).unlink()


def test_the_streams_and_the_connection_file_have_their_own_places_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    (tmp_path / "notes").write_bytes(FOREIGN)
    (tmp_path / "store" / "lock").mkdir(parents=True)
    device = device_in(tmp_path)
    before = identity(device)
    for store in ("notes", "device", "store"):
        assert main(["up", "--store-dir", str(tmp_path / store)]) == 2
        assert "pass --store-dir DIR" in capsys.readouterr().err
    assert (identity(device), (tmp_path / "notes").read_bytes()) == (before, FOREIGN)
    monkeypatch.setattr("dynamix.cli.commands.up.running", lambda _: None)
    (tmp_path / "run" / "dynamix" / "connection.json").mkdir(parents=True)
    assert main(["up", "--store-dir", str(tmp_path / "new")]) == 2
    assert "connection.json is not a regular file" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_taken_port_is_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for flag in ("--port", "--metrics-port"):
            assert main(["up", flag, str(port), "--store-dir", str(tmp_path / "store")]) == 1
            said = capsys.readouterr().err
            assert f"{flag} {port}: 127.0.0.1:{port} cannot be listened on (Address already in use)" in said
    assert not (tmp_path / "store").exists()


def test_a_locale_without_a_character_shows_another_one() -> None:
    script = "import sys; from dynamix.cli import main; main.dispatch = lambda _: print('\\u2588 ok') or 0; main.main()"
    environ = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "? ok\n", "")
