from pathlib import Path

import pytest
import torch
from bench.coding import coding_s
from tests.support.benches import run_bench

from dynamix.lab.simulator.scenario import Coding
from dynamix.trainer.exchange.codec import BucketPart, BucketView, Member
from dynamix.trainer.exchange.registry import CODECS, exchange_codec


def test_every_codec_that_virtual_clusters_know_is_timed_beside_their_default(tmp_path: Path) -> None:
    rows = run_bench("coding", tmp_path / "result.json", "--repeats", "1")["codecs"]
    assert {(row["codec"], row["num_bytes"], row["world_size"]) for row in rows} == {
        (name, size, ranks) for name in CODECS for size in (2**20, 2**22) for ranks in (4, 8)
    }
    says = {(row["codec"], row["num_bytes"], row["world_size"]): row["says_ms"] for row in rows}
    assert says["powersgd", 2**20, 4] == pytest.approx(1e-3 * Coding().powersgd * 2**20)  # by all-reduces: no messages
    assert all(row["median_ms"] > 0 for row in rows)


def test_what_is_timed_is_the_sum_of_all_ranks() -> None:
    parts = (BucketPart("weight", 0, 6, torch.Size((2, 3))),)
    views = [BucketView(0, torch.full((6,), float(rank)), parts) for rank in (1, 2)]
    members = [Member(rank, 2, (1.0, 1.0)) for rank in range(2)]
    assert coding_s([exchange_codec("none").reduce(*each) for each in zip(views, members, strict=True)]) > 0
    assert [view.flat.tolist() for view in views] == [[3.0] * 6] * 2
