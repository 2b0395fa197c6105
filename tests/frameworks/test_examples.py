"""The examples for frameworks: few lines differ, and both scripts train alike while the sizes follow the speeds."""

import difflib
import importlib.util
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.frameworks.recorded_example import num_ranks_of
from tests.support.scripts import run_script

EXAMPLES = Path(__file__).parents[2] / "examples"
NUM_EPOCHS, NUM_SAMPLES = 3, 12_288
FRAMEWORKS = {"accelerate": "accelerate", "lightning": "lightning", "transformers": "transformers"} | dict.fromkeys(
    ("fsdp2", "hsdp"), "torch"
)
"""Examples, and the package that each needs."""


def _code_lines(path: Path) -> list[str]:
    """The lines without the first docstring and blank lines."""
    return [line for line in path.read_text().splitlines()[1:] if line.strip()]


@pytest.mark.parametrize(
    ("name", "added", "removed"),
    [
        ("ddp", 2, 0),
        ("accelerate", 2, 0),
        ("lightning", 2, 0),
        ("transformers", 4, 1),
        ("fsdp2", 2, 0),
        ("hsdp", 3, 1),
        ("ray", 3, 1),
    ],
)
def test_attaching_changes_few_lines(name: str, added: int, removed: int) -> None:
    plain, attached = (_code_lines(EXAMPLES / f"{name}_{kind}.py") for kind in ("plain", "dynamix"))
    differing = [line[0] for line in difflib.ndiff(plain, attached) if line[0] in "+-"]
    assert (differing.count("+"), differing.count("-")) == (added, removed)


def _record(directory: Path, name: str) -> dict[str, list[dict[str, Any]]]:
    """What the ranks of both examples wrote down."""
    result = run_script(
        "tests.frameworks.recorded_example",
        *(FRAMEWORKS[name], name, str(directory)),
        cwd=EXAMPLES.parent,
        environ={"DYNAMIX_NATS_URL": "nats://127.0.0.1:9", "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return {
        kind: [torch.load(directory / f"{kind}{rank}.pt") for rank in range(num_ranks_of(name))]
        for kind in ("plain", "dynamix")
    }


@pytest.mark.slow
@pytest.mark.timeout(210)
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_an_attached_example_uses_the_same_samples_and_comes_out_alike(name: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(FRAMEWORKS[name]) is None:
        pytest.skip(f"{FRAMEWORKS[name]} is not installed: make test-frameworks")
    found = _record(tmp_path, name)
    for kind, ranks in found.items():
        used = Counter(index for rank in ranks for index in rank["used"])
        # attaching reads a few samples on each rank, twice, to compare them
        compared = {index: NUM_EPOCHS + 2 * len(ranks) for index in (0, 4095, 8191, 12287) if kind == "dynamix"}
        assert used == Counter(dict.fromkeys(range(NUM_SAMPLES), NUM_EPOCHS) | compared), kind
        assert all(torch.equal(rank["parameters"], ranks[0]["parameters"]) for rank in ranks), kind
    plain, attached = found["plain"][0], found["dynamix"][0]
    assert plain["accuracy"] > 0.97
    assert attached["accuracy"] == pytest.approx(plain["accuracy"], abs=0.01)
    assert len(plain["used"]) == NUM_EPOCHS * NUM_SAMPLES / len(found["plain"])
    assert len(found["dynamix"][1]["used"]) < 0.8 * len(plain["used"])  # rank 1 is slower
