"""Where commands may write: every output option of every command, before any work starts."""

import argparse
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.support.devices import device_in, identity
from tests.support.learned import policy_file

from dynamix.cli import main as cli
from dynamix.cli.connection import path as connection_file
from dynamix.cli.main import main

FOREIGN = b"import os\n\nprint('hours of work')\n"
OUTPUTS = {"--json", "--png", "--output", "--results", "--log"}
WITHOUT = {"train", "serve-gradients", "up", "dashboard", "trace"}
"""Commands without a file of output; `up` has a directory, see below."""


class Option(NamedTuple):
    """An output option of a command, and the words in front of it."""

    words: tuple[str, ...]
    flag: str

    @property
    def name(self) -> tuple[str, str]:
        return self.words[0], self.flag


def options() -> Iterator[Option]:
    """All output options, found in the commands' own parsers."""
    for name in cli.COMMANDS:
        parser = argparse.ArgumentParser(prog=name)
        folder = name.replace("-", "_")
        importlib.import_module(f"{cli.PACKAGE}.{folder}.command").configure(parser)
        yield from _options_of(parser, (name,))


def _options_of(parser: argparse.ArgumentParser, words: tuple[str, ...]) -> Iterator[Option]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, sub in action.choices.items():
                yield from _options_of(sub, (*words, name))
        if found := OUTPUTS.intersection(action.option_strings):
            yield Option(words, found.pop())


ALL = list(options())
FILES = [option for option in ALL if option.flag != "--log"]


def named(option: Option) -> str:
    return " ".join((*option.words, option.flag))


def refused(option: Option, path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command says about a path; it must end with code 2 and one sentence."""
    assert main([*option.words, option.flag, str(path)]) == 2
    said = capsys.readouterr().err
    sentence, _, hint = said.partition("\n")
    assert hint in ("", f"Try 'dynamix {' '.join(option.words)} --help'.\n")
    return sentence


def test_every_command_has_its_outputs_in_this_test() -> None:
    assert {option.words[0] for option in ALL} == set(cli.COMMANDS) - WITHOUT
    assert {option.flag for option in ALL} == OUTPUTS


@pytest.mark.parametrize("option", FILES, ids=named)
def test_a_directory_is_refused(option: Option, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"{tmp_path} is a directory: name a file" in refused(option, tmp_path, capsys)


@pytest.mark.parametrize("option", FILES, ids=named)
def test_a_missing_directory_is_said_at_once(
    option: Option, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert "cannot be written: Not a directory" in refused(option, tmp_path / "file" / "below", capsys)
    if option.flag != "--results":  # whose directories are made
        assert "there is no directory" in refused(option, tmp_path / "none" / "file", capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("option", [option for option in FILES if option.name != ("capture", "--output")], ids=named)
def test_a_file_of_the_users_stays_as_it_is(option: Option, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(FOREIGN)
    assert "and would be lost: name another file, or remove this one" in refused(option, path, capsys)
    assert path.read_bytes() == FOREIGN
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.parametrize("option", FILES, ids=named)
@pytest.mark.parametrize("linked", [False, True])
def test_a_device_stays_a_device(
    option: Option, tmp_path: Path, capsys: pytest.CaptureFixture[str], *, linked: bool
) -> None:
    device = device_in(tmp_path)
    path = tmp_path / "link" if linked else device
    if linked:
        path.symlink_to(device)
    before, held = identity(device), sorted(tmp_path.iterdir())
    sentence = refused(option, path, capsys)
    assert any(f"{path} is a {kind}: name a file" in sentence for kind in ("device", "FIFO"))
    assert (identity(device), sorted(tmp_path.iterdir())) == (before, held)


def test_curves_go_into_a_directory_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    device = device_in(tmp_path)
    before = identity(device)
    assert "name a directory" in refused(Option(("learn",), "--log"), device, capsys)
    assert identity(device) == before


def test_two_outputs_are_never_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    typed = ["--results", str(tmp_path / "file"), "--json", str(tmp_path / "link")]
    assert main(["evaluate", *typed]) == 2
    assert "is named for two outputs" in capsys.readouterr().err
    assert not (tmp_path / "file").exists()


def test_results_are_not_taken_for_other_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "runs.jsonl"
    results.write_bytes(b'{"dynamix":"results of runs, a line each","format":1}\n')
    before = results.read_bytes()
    assert "would be lost" in refused(Option(("evaluate",), "--json"), results, capsys)
    assert results.read_bytes() == before


@pytest.mark.parametrize("more", [(), ("--restart",)])
def test_learning_leaves_alone_what_stands_where_its_checkpoint_would(
    more: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint = tmp_path / "ppo-0.safetensors.checkpoint"
    checkpoint.write_bytes(FOREIGN)
    assert main(["learn", *more]) == 2
    assert "is not a checkpoint of `dynamix learn` and would be lost" in capsys.readouterr().err
    assert checkpoint.read_bytes() == FOREIGN
    checkpoint.unlink()
    device_in(tmp_path).rename(checkpoint)
    before = identity(checkpoint)
    assert main(["learn", *more]) == 2
    assert "name a file" in capsys.readouterr().err
    assert identity(checkpoint) == before


def test_a_default_output_is_checked_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, command in (("dynamix-demo.png", "demo"), ("ppo-0.safetensors", "learn")):
        (tmp_path / name).write_bytes(FOREIGN)
        assert main([command]) == 2
        assert f"{name} is not a" in capsys.readouterr().err
        assert (tmp_path / name).read_bytes() == FOREIGN


def test_a_policy_is_exported_over_a_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNAMIX_NATS_URL", "nats://127.0.0.1:1")
    path = tmp_path / "mine.safetensors"
    path.write_bytes(policy_file().to_bytes())
    assert main(["policy", "export", "ppo:1", "-o", str(path)]) == 0
    assert path.read_bytes() != policy_file().to_bytes()


@pytest.mark.parametrize("device", [False, True])
def test_the_streams_are_kept_in_a_directory_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, device: bool
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    path = tmp_path / "notes"
    path.write_bytes(FOREIGN)
    if device:
        path = device_in(tmp_path)
    before = identity(path)
    assert main(["up", "--store-dir", str(path)]) == 2
    assert "name a directory" in capsys.readouterr().err
    assert identity(path) == before
    assert (tmp_path / "notes").read_bytes() == FOREIGN


def test_the_lock_of_the_streams_is_no_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    (tmp_path / "store").mkdir()
    lock = device_in(tmp_path).rename(tmp_path / "store" / "lock")
    before = identity(lock)
    assert main(["up", "--store-dir", str(tmp_path / "store")]) == 2
    assert "name a file" in capsys.readouterr().err
    assert identity(lock) == before


def test_a_directory_in_the_connection_files_place_is_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr("dynamix.cli.commands.up.command.running", lambda _: None)
    connection_file(os.environ).mkdir(parents=True)
    assert main(["up", "--store-dir", str(tmp_path / "store")]) == 2
    assert "connection.json is a directory: name a file" in capsys.readouterr().err
    assert not (tmp_path / "store").exists()
