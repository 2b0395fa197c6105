"""The benchmark of exchanges: what is summed, what is made of timings, and one small run on real hosts."""

from pathlib import Path

import pytest
import torch
from bench.exchange.figures import missed
from bench.exchange.gradients import NUM_GRADIENTS, buckets_of, make_gradients, sparse_of
from bench.exchange.plan import Case, Mask, RankPlan, exchange_parser, plan_of
from bench.exchange.rank import ArmTimings
from bench.exchange.result import panels_of, summarise, targets_of, text_of
from tests.support.benches import run_bench

PLAN = RankPlan(num_elements=1 << 14, num_buckets=3, num_rounds=3, num_warm_up=1, arms=("all-reduce", "rows"), seed=1)


def case_of(mask: Mask = "identical", density: float = 0.05, width: int = 1) -> Case:
    return Case(num_ranks=4, link="100mbit", density=density, mask=mask, width=width)


def rows_of(flat: torch.Tensor, width: int) -> set[int]:
    return set((flat.view(-1, width) != 0).any(1).nonzero().flatten().tolist())


@pytest.mark.parametrize("width", [1, 16])
def test_gradients_have_as_many_rows_as_the_density_says(width: int) -> None:
    gradients = make_gradients(case_of(width=width), PLAN, rank=2)
    assert len(gradients) == NUM_GRADIENTS
    for flat in gradients:
        assert (flat.shape, flat.dtype) == ((1 << 14,), torch.float32)
        assert len(rows_of(flat, width)) == round(0.05 * (1 << 14) / width)
        assert 0.008 < flat[flat != 0].std() < 0.012


def test_a_steady_mask_is_the_same_on_all_ranks_and_in_all_gradients_whose_values_differ() -> None:
    steady = [flat for rank in (0, 1) for flat in make_gradients(case_of("steady"), PLAN, rank)]
    assert all(rows_of(flat, 1) == rows_of(steady[0], 1) for flat in steady)
    assert len({float(flat.sum()) for flat in steady}) == 2 * NUM_GRADIENTS


def test_other_masks_are_those_of_all_ranks_or_of_one_and_change_with_every_gradient() -> None:
    same = [make_gradients(case_of("identical"), PLAN, rank) for rank in (0, 1)]
    others = [make_gradients(case_of("independent"), PLAN, rank) for rank in (0, 1)]
    assert rows_of(same[0][0], 1) == rows_of(same[1][0], 1)
    assert not torch.equal(same[0][0], same[1][0])
    assert len(rows_of(others[0][0], 1) & rows_of(others[1][0], 1)) < 100  # 819 each, 41 by chance
    assert len(rows_of(same[0][0], 1) & rows_of(same[0][1], 1)) < 100
    assert torch.equal(same[0][1], make_gradients(case_of("identical"), PLAN, 0)[1])


def test_a_sparse_tensor_and_buckets_hold_the_gradient() -> None:
    flat = make_gradients(case_of(width=16), PLAN, 0)[0]
    sparse = sparse_of(flat, 16)
    assert sparse.values().shape == (51, 16)
    assert torch.equal(sparse.to_dense().flatten(), flat)
    buckets = buckets_of(flat, 16, 3)
    assert torch.equal(torch.cat([bucket.flat for bucket in buckets]), flat)
    assert [tuple(part.shape) for bucket in buckets for part in bucket.parts] == [(341, 16), (341, 16), (342, 16)]
    assert all(bucket.parts[0].stop == len(bucket.flat) for bucket in buckets)


def timings(wall_s: list[float], *, tx_bytes: int = 1000, digest: int = 7, error: float = 0.0) -> ArmTimings:
    cpu_s = [0.5 * wall for wall in wall_s]
    return ArmTimings(wall_s=wall_s, cpu_s=cpu_s, tx_bytes=[tx_bytes] * len(wall_s), digest=digest, error=error)


def test_an_exchange_lasts_until_the_slowest_rank_has_the_sum() -> None:
    ranks = [
        {"all-reduce": timings([1.0, 1.0, 2.0]), "rows": timings([0.1, 0.5, 0.2], tx_bytes=100)},
        {"all-reduce": timings([1.5, 2.5, 1.0]), "rows": timings([0.3, 0.1, 0.4], tx_bytes=300)},
    ]
    result = summarise(case_of(), 1_000_000, ranks)
    dense, rows = result.arms
    assert (dense.median_s, dense.range_s, dense.speedup) == (2.0, (1.5, 2.5), 1.0)
    assert dense.throughput_mbit_s == pytest.approx(16)
    assert (rows.median_s, rows.speedup, rows.tx_bytes) == (0.4, 5.0, 200)
    assert rows.cpu_s == pytest.approx(0.3)  # of 0.2, 0.3 and 0.3
    assert [(target.value, target.at_least, target.met) for target in targets_of([result])] == [(5.0, 8.0, False)]
    assert missed([result]) == []
    assert "identical masks" in text_of([result])


def test_a_lossless_sum_that_differs_is_missed_and_a_codec_with_loss_may_differ() -> None:
    ranks = [{"all-reduce": timings([1.0]), "rows": timings([1.0], error=1e-5), "int8": timings([1.0], error=1e-2)}]
    other = [{**ranks[0], "int8": timings([1.0], digest=8)}]
    assert [text.split()[0] for text in missed([summarise(case_of(), 1, ranks)])] == ["rows"]
    assert [text.split()[0] for text in missed([summarise(case_of(), 1, ranks + other)])] == ["rows", "int8"]


def test_every_combination_is_a_case_and_a_dense_gradient_has_one_mask() -> None:
    arguments = ["--links", "100mbit,none", "--densities", "1,0.05", "--ranks", "2,4", "--widths", "1,32"]
    plan = plan_of(exchange_parser("").parse_args(arguments))
    cases = [case for case in plan.cases() if case.num_ranks == 4]
    assert len(cases) == 2 * 2 * 4
    assert [case.link for case in cases] == ["100mbit"] * 8 + ["none"] * 8
    assert [case.num_ranks for case in plan.cases()] == [2] * 16 + [4] * 16
    assert [len(panels) for panels in panels_of([], plan)] == [6, 6, 6, 6]


def test_servers_are_a_case_each_with_a_panel_of_its_own() -> None:
    arguments = ["--servers", "1,4", "--arms", "all-reduce,none@servers", "--masks", "steady"]
    plan = plan_of(exchange_parser("").parse_args(arguments))
    results = [summarise(case, 1, [{"all-reduce": timings([1.0])}]) for case in plan.cases()]
    assert [result.name.split(", 100")[0] for result in results] == [
        "4 ranks, 1 gradient server",
        "4 ranks, 4 gradient servers",
    ]
    panels = [panel for row in panels_of(results, plan) for panel in row]
    assert [len(panel.curves[0].points) for panel in panels] == [1, 1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--arms", "rows"], "begin with all-reduce"),
        (["--arms", "all-reduce,zip"], "'zip' is none of"),
        (["--arms", "all-reduce,rows,rows"], "each once"),
        (["--ranks", "1"], "--ranks 1: from 2"),
        (["--ranks", "two"], "write numbers"),
        (["--links", "fast"], "'fast' is not a rate"),
        (["--densities", "0"], "--densities 0"),
        (["--masks", "equal"], "'equal' is none of"),
        (["--widths", "3"], "not whole rows"),
        (["--buckets", "9", "--log2-elements", "3", "--densities", "1"], "--buckets 9: more than rows"),
        (["--rounds", "0"], "--rounds 0: at least 1"),
        (["--servers", "-1"], "--servers -1: from 0"),
        (["--servers", "2"], "no arm uses them, add CODEC@servers"),
        (["--arms", "all-reduce,rows@servers"], "rows@servers: say how many with --servers"),
        (["--arms", "all-reduce,rows@servers", "--servers", "0,1"], "at least 1"),
        (["--arms", "all-reduce,int8@servers", "--servers", "1"], "'int8@servers' is none of"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plan_of(exchange_parser("").parse_args(arguments))


@pytest.mark.bpf
def test_with_gradient_servers_sums_are_the_same_and_ranks_send_less(tmp_path: Path) -> None:
    sizes = ("--log2-elements", "16", "--rounds", "2", "--warm-up", "1", "--ranks", "3", "--densities", "1")
    arms = ("--arms", "all-reduce,none@servers,sketch@servers", "--servers", "1,3", "--links", "1gbit")
    found = run_bench("exchange", tmp_path / "result.json", *sizes, *arms)
    assert [result["case"]["num_servers"] for result in found["cases"]] == [1, 3]
    for result in found["cases"]:
        dense, served, sketched = result["arms"]
        assert all(arm["is_same"] and arm["error"] < 1e-6 for arm in (dense, served, sketched))
    one, three = (result["arms"][1]["tx_bytes"] / (4 * 65_536) for result in found["cases"])
    assert 1.2 < one < 1.35  # 1 + s (N - 2) of the gradient, where a server owns 2/5 and a rank s = 1/5 of it
    assert 1.0 < three < 1.1  # servers own all of it


@pytest.mark.bpf
def test_sums_are_right_and_fewer_bytes_travel_on_real_hosts(tmp_path: Path) -> None:
    sizes = ("--log2-elements", "16", "--rounds", "2", "--warm-up", "1", "--ranks", "3", "--widths", "16")
    arms = ("--arms", "all-reduce,torch-sparse,none@shares,rows,int8", "--png", str(tmp_path / "figure.png"))
    found = run_bench(
        "exchange", tmp_path / "result.json", *sizes, *arms, "--masks", "identical,independent", "--links", "1gbit"
    )
    identical, independent = found["cases"]
    for result in (identical, independent):
        dense, sparse, owners, rows, int8 = result["arms"]
        assert all(arm["is_same"] for arm in result["arms"])
        assert max(arm["error"] for arm in (sparse, owners, rows)) < 1e-6
        assert 0 < int8["error"] < 0.1
        assert 1.0 < dense["tx_bytes"] / (4 / 3 * 4 * 65_536) < 1.1  # 2 (N - 1) / N of the gradient, and headers
        assert 1.0 < owners["tx_bytes"] / (4 / 3 * 4 * 65_536) < 1.1
        assert rows["tx_bytes"] < 0.3 * dense["tx_bytes"]
    assert independent["arms"][3]["tx_bytes"] > 1.5 * identical["arms"][3]["tx_bytes"]
    assert (tmp_path / "figure.png").stat().st_size > 10_000
