"""The two lines of the first guide, run as they stand there, by two ranks."""

import asyncio
import logging
import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tests.support.guides import blocks
from tests.support.ranks import run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "start.md"


def _side_effects() -> tuple[Any, ...]:
    handlers = tuple(signal.getsignal(number) for number in signal.valid_signals())
    return handlers, tuple(logging.root.handlers), logging.root.level, type(asyncio.get_event_loop_policy())


def _run_script(_rank: int, script: str) -> dict[str, Any]:
    """Run the script; the group is there already."""
    before = _side_effects()
    names: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "init_process_group", lambda _: None)
        patch.setattr(dist, "destroy_process_group", lambda: None)
        exec(compile(script, str(PAGE), "exec"), names)
    return {
        "position": names["session"].position,
        "loss": names["criterion"](names["model"].module(names["inputs"]), names["dataset"].tensors[1]).item(),
        "side_effects": [ours for ours, theirs in zip(before, _side_effects(), strict=True) if ours != theirs],
    }


def test_the_two_lines_of_the_first_guide_train_and_leave_no_trace_in_the_process() -> None:
    script = next(code for _, code in blocks(PAGE))
    assert [f"# {number}" in script for number in range(1, 4)] == [True] * 2 + [False]
    for result in run_ranks(_run_script, 2, script):
        assert result["position"] == 2 * 2000
        assert result["loss"] < 0.5 * math.log(2)
        assert result["side_effects"] == []
