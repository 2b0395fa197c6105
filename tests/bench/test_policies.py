from pathlib import Path

from tests.support.benches import run_bench

from dynamix.arbitrator.policies.registry import POLICIES
from dynamix.schemas.messages.fields import MAX_CARRY_BYTES


def test_it_times_every_policy_up_to_10000_ranks(tmp_path: Path) -> None:
    rows = run_bench("policies", tmp_path / "result.json", "--repeats", "1")["decisions"]
    assert {(row["policy"], row["world_size"]) for row in rows} == {
        (name, size) for name in [*POLICIES, "ppo", "ppo-paper"] for size in (8, 128, 1024, 10_000)
    }
    assert all(row["median_ms"] > 0 and row["carry_bytes"] <= MAX_CARRY_BYTES for row in rows)
