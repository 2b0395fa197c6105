"""The benchmark of training steps by codec: what is made of timings, and one small run on real hosts."""

from pathlib import Path

import pytest
from bench.exchange.figures import missed
from bench.exchange.rank import ArmTimings
from bench.exchange.steps.plan import StepsCase, plan_of, steps_parser
from bench.exchange.steps.result import summarise, targets_of, text_of
from tests.support.benches import run_bench

CASE = StepsCase(num_ranks=2, link="100mbit", workload="ncf", local_batch_size=64)


def timings(wall_s: list[float], *, digest: int = 7, error: float = 0.0) -> ArmTimings:
    tx_bytes = [3000] * len(wall_s)
    return ArmTimings(wall_s=wall_s, cpu_s=wall_s, tx_bytes=tx_bytes, digest=digest, error=error)


def test_a_step_counts_when_the_slowest_rank_has_made_it() -> None:
    ranks = [
        {"all-reduce": timings([3.0, 6.0, 2.0]), "rows": timings([0.3, 1.0, 0.5])},
        {"all-reduce": timings([1.0, 1.0, 3.0]), "rows": timings([1.5, 0.3, 0.5])},
    ]
    result = summarise(CASE, 3, ranks)
    dense, rows = result.arms
    assert (dense.steps_per_s, dense.range_per_s, dense.speedup) == (1.0, (0.5, 1.0), 1.0)
    assert (rows.steps_per_s, rows.speedup, rows.tx_bytes) == (3.0, 3.0, 1000)
    assert rows.cpu_s == pytest.approx(1.3 / 3)
    assert [(target.value, target.met) for target in targets_of([result])] == [(3.0, False)]
    assert missed([result]) == []
    assert "ncf, 64 samples each, 2 ranks, 100mbit" in text_of([result])


def test_parameters_that_differ_are_missed() -> None:
    ranks = [{"all-reduce": timings([1.0]), "rows": timings([1.0], error=1e-3), "int8": timings([1.0], error=1e-3)}]
    other = [{**ranks[0], "int8": timings([1.0], digest=8)}]
    assert [text.split()[0] for text in missed([summarise(CASE, 1, ranks)])] == ["rows"]
    assert [text.split()[0] for text in missed([summarise(CASE, 1, ranks + other)])] == ["rows", "int8"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--workloads", "ncf,bert"], "'bert' is not known"),
        (["--arms", "rows"], "begin with all-reduce"),
        (["--links", "fast"], "'fast' is not a rate"),
        (["--local-batch-sizes", "0"], "--local-batch-sizes 0"),
        (["--steps", "0"], "--steps 0: at least 1"),
    ],
)
def test_what_cannot_be_trained_is_refused(arguments: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plan_of(steps_parser("").parse_args(arguments))


@pytest.mark.bpf
def test_two_ranks_train_to_the_same_bits_with_every_lossless_arm(tmp_path: Path) -> None:
    sizes = ("--workloads", "ncf-small", "--ranks", "2", "--rounds", "2", "--steps", "2", "--local-batch-sizes", "16")
    found = run_bench("exchange.steps", tmp_path / "result.json", *sizes, "--links", "1gbit")
    (result,) = found["cases"]
    dense, sparse, rows, sketch, int8 = result["arms"]
    assert all(arm["is_same"] for arm in result["arms"])
    assert rows["error"] == 0  # of two addends the order does not matter
    assert max(sparse["error"], sketch["error"]) < 1e-6
    assert 0 < int8["error"] < 0.1
    assert dense["tx_bytes"] > 4 * 64_185  # 2 (N - 1) / N of the gradient
    assert rows["tx_bytes"] < 0.3 * dense["tx_bytes"]
