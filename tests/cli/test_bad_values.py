"""Values that no command can use: one sentence before any work, an exit code that is not 0, never a traceback."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dynamix.cli.main import main
from dynamix.runtime.output_files import RefusedOutputError, check

LONG = "a" * 300
DEMO = Path(__file__).parents[1] / "data" / "demo.dxc"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("demo --target nan", "demo: argument --target: nan: it must be a number above 0 and at most 1"),
        ("demo --target 2", "demo: argument --target: 2: it must be a number above 0 and at most 1"),
        ("demo --pace nan", "demo: argument --pace: nan: it must be a number at least 0 and at most 10"),
        ("demo --pace inf", "demo: argument --pace: inf: it must be a number at least 0 and at most 10"),
        ("demo --pace fast", "demo: argument --pace: 'fast' is no number"),
        ("demo --slowdown 0", "demo: argument --slowdown: 0: it must be a number above 0 and at most 1000"),
        ("demo --windows 0", "demo: argument --windows: 0: it must be 1 to 100000"),
        ("demo --windows 1.5", "demo: argument --windows: '1.5' is no whole number"),
        ("demo --seed -1", "demo: argument --seed: -1: it must be 0 to 2147483647"),
        ("demo --policy rul", "demo: argument --policy: no policy is called 'rul': did you mean rule?"),
        ("learn --minutes nan", "learn: argument --minutes: nan: it must be a number at least 0"),
        ("learn --minutes -1", "learn: argument --minutes: -1: it must be a number at least 0"),
        ("learn --seed -1", "learn: argument --seed: -1: it must be 0 to 2147483647"),
        ("simulate train/mixed-8 --seed 99999999999999999999", "it must be 0 to 2147483647"),
        ("provision --wait nan", "provision: argument --wait: nan: it must be a number at least 0 and at most 86400"),
        ("up --port -1", "up: up settings: port must be 0 (a free one) to 65535, not -1"),
        ("up --port 99999", "up: up settings: port must be 0 (a free one) to 65535, not 99999"),
        ("up --port x", "up: --port='x': Expected `int`, got `str`"),
        (f"train --name {LONG} -- x.py", "cannot be part of a subject: use 1 to 63 of the characters"),
        (f"learn --policy {LONG}", "Expected `str` matching regex"),
        (f"policy import {LONG}", "File name too long"),
        (f"demo --policy {LONG}", "demo: argument --policy: no policy is called"),
        (f"simulate {LONG}", f"simulate: scenario '{'a' * 64}' is neither a file nor among those that are shipped"),
    ],
)
def test_a_bad_value_is_one_sentence_and_an_error_of_usage(
    words: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) in (1, 2)
    said = capsys.readouterr().err
    assert sentence in said
    assert [line for line in said.splitlines() if not line.startswith("Try '")] == said.splitlines()[:1]


@pytest.mark.parametrize(
    "words", ["learn --episodes 1 -o", "demo --json", "demo --png", "evaluate --json", "learn --log"]
)
def test_the_kernels_own_directories_take_no_files(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words.split(), "/proc/x"]) == 2
    assert "/proc/x " in capsys.readouterr().err


def test_a_directory_is_tried_without_leaving_anything_in_it(tmp_path: Path) -> None:
    before = tmp_path.stat().st_mtime_ns
    check(tmp_path / "file")
    assert (list(tmp_path.iterdir()), tmp_path.stat().st_mtime_ns) == ([], before)
    with pytest.raises(RefusedOutputError, match="directory /sys takes no files"):
        check(Path("/sys/x"))


@pytest.mark.parametrize("place", ["/proc/self/mem", "/proc/kmsg", "/sys/kernel/notes"])
@pytest.mark.parametrize("words", ["policy import", "simulate", "inspect", "evaluate --tuned"])
def test_what_the_kernel_makes_up_is_not_read(words: str, place: str, capsys: pytest.CaptureFixture[str]) -> None:
    if not Path(place).exists():
        pytest.skip(f"this kernel has no {place}")
    assert main([*words.split(), place]) in (1, 2)
    said = capsys.readouterr().err
    assert f"{place}: " in said
    assert "made up by the kernel" in said


@pytest.mark.parametrize("words", ["simulate", "evaluate --tuned", "evaluate --scenarios"])
def test_values_nested_ten_thousand_times_are_refused(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "deep.toml").write_text("a = " + "[" * 10_000)
    place = tmp_path if words.endswith("--scenarios") else tmp_path / "deep.toml"
    assert main([*words.split(), str(place)]) in (1, 2)
    said = capsys.readouterr().err
    assert f"{tmp_path / 'deep.toml'}: not a " in said
    assert "nested too deeply" in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("job", ["mnist/1", "Mnist-1", "a" * 64, "mnist.1", "", "mnist>"])
@pytest.mark.parametrize("words", ["capture {} -o x.dxc", "doctor --actions {}", "top {}", "top --once {}"])
def test_what_no_job_can_be_called_is_refused_before_a_broker_is_asked(
    words: str, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DYNAMIX_NATS_URL", "nats://127.0.0.1:1")  # no broker: asking it would be an error, or wait
    assert main([word.format(job) for word in words.split()]) == 2
    name, said = words.split(maxsplit=1)[0], capsys.readouterr()
    assert said.err == f"dynamix {name}: {job!r} names no job: use 1 to 63 of the characters a-z, 0-9 and '-'\n"
    assert said.out == ""


@pytest.mark.parametrize("words", ["export Mnist", "calibrate Mnist --workload fashion-mnist"])
def test_where_a_capture_is_taken_too_a_name_of_no_job_is_refused_as_early(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DYNAMIX_NATS_URL", "nats://127.0.0.1:1")
    assert main(words.split()) == 2
    said = capsys.readouterr().err
    assert "'Mnist' names no job: use 1 to 63 of the characters" in said
    assert said.endswith("; nor is there a file Mnist\n")


def test_a_figure_is_drawn_without_a_word_where_home_takes_no_files(tmp_path: Path) -> None:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("XDG_", "MPL"))}
    done = subprocess.run(
        [sys.executable, "-m", "dynamix.cli.main", "inspect", str(DEMO), "--png", str(tmp_path / "figure.png")],
        env={**kept, "HOME": "/proc/x"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "figure.png").stat().st_size > 1000


def test_a_taken_port_is_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["up", "--port", str(port), "--store-dir", str(tmp_path / "store")]) == 1
    said = capsys.readouterr().err
    assert said.startswith(
        f"dynamix up: --port {port}: 127.0.0.1:{port} cannot be listened on (Address already in use)"
    )
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("words", ["provision", "top --once", "capture a -o x.dxc"])
@pytest.mark.parametrize(
    ("key", "what"),
    [
        ("CA_FILE", "it holds no certificates; name a file of certificates (PEM)"),
        ("PASSWORD_FILE", "it has 70000 bytes, more than 65536; name a file that holds the password"),
    ],
)
def test_a_garbage_file_of_the_connection_is_named(
    words: str, key: str, what: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    monkeypatch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
    capsys: pytest.CaptureFixture[str] = request.getfixturevalue("capsys")
    (tmp_path / "garbage").write_bytes(b"\xff\x00garbage" + bytes(70_000 - 9))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(f"DYNAMIX_NATS_{key}", str(tmp_path / "garbage"))
    assert main(words.split()) == 1
    said = capsys.readouterr().err
    assert f"DYNAMIX_NATS_{key}='{tmp_path / 'garbage'}'" in said
    assert said.endswith(f"{what}\n")


def test_a_service_refuses_a_garbage_file_of_certificates_with_the_code_of_bad_settings(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("garbage")
    done = subprocess.run(
        [sys.executable, "-m", "dynamix.reward"],
        env={**os.environ, "DYNAMIX_NATS_CA_FILE": str(tmp_path / "ca.pem")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == (
        f"dynamix reward: DYNAMIX_NATS_CA_FILE='{tmp_path / 'ca.pem'}' cannot be used: it holds no certificates; "
        "name a file of certificates (PEM)\n"
    )


def test_a_locale_without_a_character_shows_another_one() -> None:
    script = "import sys; from dynamix.cli import main; main.dispatch = lambda _: print('\\u2588 ok') or 0; main.main()"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "? ok\n", "")


def test_a_home_that_takes_no_files_is_said_with_the_fix(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", "/proc/x")
    for name in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    assert main(["up"]) == 2
    assert "directory /proc takes no files" in capsys.readouterr().err


def test_make_says_when_python_has_no_module_venv(tmp_path: Path) -> None:
    makefile = Path(__file__).parents[2] / "Makefile"
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    (tmp_path / "python").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    done = subprocess.run(
        ["make", "-C", str(tmp_path), "-f", str(makefile), "venv", "PYTHON=./python"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "./python is missing or has no module venv: apt-get install python3-venv" in done.stderr
    assert not (tmp_path / ".venv").exists()
