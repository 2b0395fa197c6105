"""The two example scripts: how little they differ, and that both run."""

import difflib
import re
from pathlib import Path

import pytest
from tests.support.scripts import run_script

EXAMPLES = Path(__file__).parents[2] / "examples"
PLAIN, ATTACHED, WORKLOAD = (EXAMPLES / f"ddp_{name}.py" for name in ("plain", "dynamix", "workload"))


def code_lines(path: Path) -> list[str]:
    """The lines without the first docstring, blank lines and the imports that only the removed lines needed."""
    lines = path.read_text().splitlines()[1:]
    return [line for line in lines if line.strip() and not line.startswith("from torch.utils.data")]


def test_attaching_writes_five_lines() -> None:
    diff = list(difflib.ndiff(code_lines(PLAIN), code_lines(ATTACHED)))
    written = [line for line in diff if line.startswith("+ ")]
    assert len(written) == 5, written
    removed = [line for line in diff if line.startswith("- ")]
    assert all(any(part in line for part in ("sampler", "DataLoader", "range(3)", "in loader")) for line in removed), (
        removed
    )


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
