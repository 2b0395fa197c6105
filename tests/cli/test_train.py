"""`dynamix train`: one id per run, the right environment, torchrun's own options untouched."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dynamix.cli.commands import train
from dynamix.cli.errors import CommandError
from dynamix.cli.main import main
from dynamix.runtime.bus.authority import Authority
from dynamix.runtime.settings import BusSettings

TORCHRUN = ["--standalone", "--nproc-per-node", "1"]


def test_the_id_is_the_name_and_eight_digits_never_the_same_twice() -> None:
    first, second = (train.identity([*TORCHRUN, "train.py"], name="mnist", given="")["DYNAMIX_JOB"] for _ in range(2))
    assert first != second
    assert re.fullmatch("mnist-[0-9a-f]{8}", first)
    given = train.identity(["--nnodes", "2", "train.py"], name="ignored", given="mnist-0a1b2c3d")
    assert given == {"DYNAMIX_JOB": "mnist-0a1b2c3d"}


def test_without_a_name_it_is_the_scripts_unless_the_script_gives_one() -> None:
    for script, name in (("a/b/My_Script.py", "my-script"), ("___.py", "job")):
        named = train.identity([*TORCHRUN, script], name=None, given="")
        assert named == {"DYNAMIX_TRAINER_NAME": name, "DYNAMIX_TRAINER_RUN_ID": named["DYNAMIX_TRAINER_RUN_ID"]}


@pytest.mark.parametrize(
    ("words", "name", "given", "said"),
    [
        ("t.py", "My Job", "", "cannot be part of a subject"),
        ("t.py", "x" * 55, "", "use at most 54"),
        ("t.py", None, "a.b", "cannot be part of a subject"),
        *((f"{option} t.py", None, "", r"--job t-[0-9a-f]{8}") for option in ("--nnodes 2", "--nnodes=1:4")),
        *((f"{option} t.py", None, "", "") for option in ("--nnodes 1", "--nnodes=1:1", "--standalone")),
        ("t.py --nnodes 9", None, "", ""),
    ],
)
def test_a_wrong_name_is_a_usage_error_and_several_nodes_must_be_told_one_id(
    words: str, name: str | None, given: str, said: str
) -> None:
    if not said:
        train.identity(words.split(), name=name, given=given)
        return
    with pytest.raises(CommandError, match=said) as caught:
        train.identity(words.split(), name=name, given=given)
    assert caught.value.exit_code == 2


def test_a_credential_says_which_jobs_can_be_trained(tmp_path: Path) -> None:
    def bus(*names: str, role: str = "trainer") -> BusSettings:
        file = tmp_path / "alice.creds"
        file.write_text(Authority.new().issue("alice", role, names, days=1).text())
        return BusSettings(creds_file=str(file))

    assert train.permitted("", None, bus("mnist")) == "mnist"
    assert train.permitted("", "mnist", bus("mnist", "resnet")) == "mnist"
    assert train.permitted("resnet-0a1b2c3d", None, bus("mnist", "resnet")) is None
    assert train.permitted("any-1", None, bus(role="watcher")) is None
    assert train.permitted("any-1", None, BusSettings()) is None
    for given, name in (("", None), ("bob-1", None), ("", "bob"), ("bob-1", "mnist")):
        with pytest.raises(CommandError, match="is for jobs named mnist, resnet only: pass one of them") as caught:
            train.permitted(given, name, bus("mnist", "resnet"))
        assert caught.value.exit_code == 2


def test_what_cannot_work_is_said_before_anything_trains(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.execve", lambda *_: pytest.fail("torchrun was started"))
    monkeypatch.setenv("DYNAMIX_NATS_CA_FILE", "/none")
    assert main(["train", "--", "train.py"]) == 1
    assert "DYNAMIX_NATS_CA_FILE='/none' cannot be " in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "torch" else object())
    assert main(["train", "--", "train.py"]) == 1
    assert f"`{sys.executable} -m pip install torch`" in capsys.readouterr().err


def test_the_environment_adds_what_ranks_need_and_keeps_what_the_user_chose() -> None:
    bus = BusSettings(url="nats://127.0.0.1:5000", user="trainer", password_file="/run/p")
    made = train.environment({"OMP_NUM_THREADS": "8", "HOME": "/h"}, {"DYNAMIX_JOB": "mnist-0a1b2c3d"}, bus, "static")
    assert made == {
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "OMP_NUM_THREADS": "8",
        "HOME": "/h",
        "DYNAMIX_NATS_URL": "nats://127.0.0.1:5000",
        "DYNAMIX_NATS_USER": "trainer",
        "DYNAMIX_NATS_PASSWORD_FILE": "/run/p",
        "DYNAMIX_JOB": "mnist-0a1b2c3d",
        "DYNAMIX_TRAINER_POLICY": "static",
    }
    assert train.environment({}, {}, bus, None)["OMP_NUM_THREADS"] == "1"


@pytest.mark.slow
def test_torchrun_starts_the_script_with_its_own_arguments_and_our_environment(tmp_path: Path) -> None:
    script = tmp_path / "show.py"
    script.write_text("import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))\n")
    environ = {**os.environ, "DYNAMIX_NATS_URL": "nats://127.0.0.1:5999", "HOME": str(tmp_path)}
    command = [sys.executable, "-m", "dynamix.cli.main", "train", "--name", "shown", "--", *TORCHRUN]
    done = subprocess.run(
        [*command, str(script), "--epochs", "3", "--", "x"], capture_output=True, text=True, env=environ, check=True
    )
    arguments, seen = json.loads(done.stdout)
    assert arguments == ["--epochs", "3", "--", "x"]
    assert seen["DYNAMIX_JOB"].startswith("shown-")
    assert f"job {seen['DYNAMIX_JOB']}, bus nats://127.0.0.1:5999" in done.stderr
    assert f"watch it with: dynamix top {seen['DYNAMIX_JOB']}\n" in done.stderr
    assert (seen["DYNAMIX_NATS_URL"], seen["OMP_NUM_THREADS"]) == ("nats://127.0.0.1:5999", "1")
    assert seen["TORCHELASTIC_RESTART_COUNT"] == "0"
