"""What commands may read: every file that a person names for input."""

import os
from pathlib import Path

import pytest

from dynamix.cli.main import main

DEMO = Path(__file__).parents[1] / "data" / "demo.dxc"


@pytest.mark.parametrize(
    "words",
    [
        "inspect",
        "replay",
        f"replay {DEMO} --policy-file",
        "calibrate --workload fashion-14-mlp",
        "simulate train/mixed-8 --policy-file",
        "evaluate --tuned",
        "policy import",
    ],
)
def test_a_fifo_is_refused_before_it_is_opened(words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    assert main([*words.split(), str(fifo)]) in (1, 2)
    assert capsys.readouterr().err.endswith(f" {fifo}: it is a FIFO, not a regular file\n")
