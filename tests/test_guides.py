"""The code of README and of the guides, run as it stands there."""

import asyncio
import logging
import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tests.support.guides import GUIDES, ROOT, blocks, run_page
from tests.support.ranks import run_ranks

PAGE = GUIDES / "start.md"
"""The first guide."""
PAGES = [ROOT / "README.md", *sorted(GUIDES.glob("*.md"))]


@pytest.mark.parametrize("page", [page for page in PAGES if any(blocks(page)) and page.stem != "frameworks"], ids=str)
def test_each_block_of_code_of_a_page_trains(page: Path, tmp_path: Path) -> None:
    (places,) = run_ranks(run_page, 1, page, str(tmp_path))
    assert places


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
