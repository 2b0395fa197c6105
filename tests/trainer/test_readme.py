"""The README's five lines, run as they stand there."""

import asyncio
import logging
import math
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import run_ranks
from torch.utils.data import TensorDataset

from dynamix.lab.workloads import datasets

README = Path(__file__).parents[2] / "services" / "trainer" / "README.md"


def _side_effects() -> tuple[Any, ...]:
    handlers = tuple(signal.getsignal(number) for number in signal.valid_signals())
    return handlers, tuple(logging.root.handlers), logging.root.level, type(asyncio.get_event_loop_policy())


def _run_script(_rank: int, script: str) -> dict[str, Any]:
    """Run the script on 500 images that are made up; the group is there already."""
    before = _side_effects()
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(500, 1, 28, 28, generator=generator)
    targets = (images.mean((1, 2, 3)) > 0).long()
    names: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets, "fashion_mnist", lambda _: TensorDataset(images, targets))
        patch.setattr(dist, "init_process_group", lambda _: None)
        patch.setattr(dist, "destroy_process_group", lambda: None)
        exec(compile(script, str(README), "exec"), names)
    return {
        "position": names["session"].position,
        "loss": names["criterion"](names["model"].module(images), targets).item(),
        "side_effects": [ours for ours, theirs in zip(before, _side_effects(), strict=True) if ours != theirs],
    }


def test_the_five_lines_of_the_readme_train_and_leave_no_trace_in_the_process() -> None:
    script = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)[0]
    assert [f"# {number}" in script for number in range(1, 7)] == [True] * 5 + [False]
    environ = {"DYNAMIX_NATS_URL": "nats://127.0.0.1:1", "DYNAMIX_TRAINER_CLOSE_TIMEOUT_S": "0"}
    for result in run_ranks(_run_script, 2, script, environ=environ):
        assert result["position"] == 1000
        assert result["loss"] < math.log(10)
        assert result["side_effects"] == []
