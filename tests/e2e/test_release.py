"""A release as `make dist` tries it: sdist, wheel, an environment, and a short demo that steers real jobs.

The environment has the packages of this one, so that torch is neither unpacked nor compiled again: pip checks that they
are all that the wheel wants, and installs the wheel alone.
"""

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


PYTHON = f"""#!/bin/sh
{sys.executable} "$@" || exit
[ "$2" != venv ] || echo {sysconfig.get_path("purelib")} >"$(echo "$3"/lib/python3.*/site-packages)/lent.pth"
"""
"""An interpreter whose environments have the packages of this one, without the clone."""


def test_a_release_is_installed_into_an_environment_of_its_own_and_runs_the_demo_there(tmp_path: Path) -> None:
    dist, result, python = tmp_path / "dist", tmp_path / "out.json", tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    done = subprocess.run(
        [
            *("sh", str(ROOT / "deploy/release.sh"), str(dist), str(python), str(ROOT / ".data/fashion-mnist")),
            *("--windows", "5", "--target", "0.4", "--pace", "0.0004"),
            *("--json", str(result), "--png", str(tmp_path / "out.png")),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "tried and ready:" in done.stdout
    assert sorted(path.suffix for path in dist.iterdir()) == [".gz", ".whl"]
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    runs = json.loads(result.read_text())["runs"]
    assert [run["policy"] for run in runs] == ["static", "split", "rule"]
    assert all(run["final_accuracy"] >= 0.4 and run["num_actions_applied"] >= 3 for run in runs)
    static, split, rule = runs
    for run in (static, split):
        assert (run["num_windows"], run["num_steps"], run["target_accuracy"]) == (5, 50, 0.4)
        assert {sum(sizes) for sizes in run["local_batch_sizes"]} == {512}
    assert {tuple(sizes) for sizes in static["local_batch_sizes"]} == {(128, 128, 128, 128)}
    assert split["local_batch_sizes"][-1][3] < 80
    assert sum(rule["local_batch_sizes"][-1]) != 512
