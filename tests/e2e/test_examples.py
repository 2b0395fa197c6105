"""The two example scripts: both run."""

import re
from pathlib import Path

import pytest
from tests.support.scripts import run_script

EXAMPLES = Path(__file__).parents[2] / "examples"
ATTACHED, WORKLOAD = (EXAMPLES / f"ddp_{name}.py" for name in ("dynamix", "workload"))


def run(directory: Path, script: Path, *arguments: str) -> str:
    """What two ranks of the script print; there is no broker at the address."""
    environ = {"DYNAMIX_NATS_URL": "nats://127.0.0.1:9", "GLOO_SOCKET_IFNAME": "lo"}
    result = run_script(script, *arguments, cwd=directory, environ=environ, num_ranks=2)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_the_attached_script_trains_without_a_broker(tmp_path: Path) -> None:
    """The script trains as plain DDP does."""
    printed = run(tmp_path, ATTACHED).splitlines()
    losses = [float(line.rpartition(" ")[2]) for line in printed if line.startswith("epoch")]
    assert len(losses) == 3
    assert losses[-1] < 0.2


@pytest.mark.slow
def test_a_workload_trains_by_name(tmp_path: Path) -> None:
    """1,000 images, 32 to each of 2 ranks: 16 steps, and what they have learned is better than guessing."""
    data = EXAMPLES.parent / ".data"
    arguments = ("--workload", "fashion-14-cnn", "--data", str(data), "--num-samples", "1000", "--epochs", "2")
    printed = run(
        tmp_path, WORKLOAD, *arguments, "--local-batch-size", "32", "--optimizer", "adam", "--learning-rate", "0.003"
    )
    last = re.search(r"2000 samples, sizes \((\d+), (\d+)\): accuracy ([0-9.]+)", printed)
    assert last is not None, printed
    assert int(last[1]) + int(last[2]) == 64  # without a bus the ranks still divide it by their speeds
    assert float(last[3]) > 0.3
