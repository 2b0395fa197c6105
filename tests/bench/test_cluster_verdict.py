"""What is said of a comparison on real clocks: ratios, their intervals, predictions and the table."""

import math
from pathlib import Path

import msgspec
import pytest
from bench.cluster.target.arms import (
    GOODPUT,
    PLAIN,
    PPO,
    RECORDED,
    RULE,
    SPLIT,
    STATIC,
    STATICS,
    TargetArm,
    keeping_sum,
    static_local,
)
from bench.cluster.target.outcomes import LOOKS
from bench.cluster.target.prediction import (
    SESSION_S,
    TRACKING_S,
    WINDOW_S,
    CalibratedCase,
    Predicted,
    calibrated,
    task_of,
    with_session_of,
)
from bench.cluster.target.verdict import (
    error_of,
    geometric_mean,
    predicted_ratio_of,
    ratio_of,
    result_of,
    steady_ratio_of,
    targets_of,
)
from bench.results.result import markdown
from tests.support.benches import ROOT
from tests.support.target_runs import CASE, compared, outcome_of

from dynamix.lab.simulator.scenario import Workers

DEMO = ROOT / "tests" / "data" / "demo.dxc"


def test_ratios_are_those_of_pairs_and_a_miss_counts_as_the_limit() -> None:
    found, _ = compared()
    ratio = ratio_of(found, RULE, STATIC)
    assert ratio is not None
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((0.7, 0.7, 0.7))
    assert ratio_of(found, RULE, GOODPUT).value == pytest.approx(14 / 16)  # type: ignore[union-attr]
    assert ratio_of(compared(RULE)[0], RULE, STATIC) is None
    plain = found.outcomes[PLAIN][0]
    assert msgspec.structs.replace(plain, time_to_target_s=None).counted_s == plain.limit_s == 40


def test_the_mean_of_several_times_counts_each_accuracy_where_three_looks_had_reached_it() -> None:
    looks = [(1.0, 0.70), (2.0, 0.79), (3.0, 0.81), (4.0, 0.80), (5.0, 0.86), (6.0, 0.86)]
    run = outcome_of(STATICS[0], 1, 6.0, 40.0)
    points = [msgspec.structs.replace(run.points[0], trained_s=time_s, accuracy=seen) for time_s, seen in looks]
    run = msgspec.structs.replace(run, points=points)
    assert run.mean_time_s([0.80]) == 4.0  # (0.79 + 0.81 + 0.80) / 3
    assert run.mean_time_s([0.76, 0.80, 0.84]) == pytest.approx((3.0 + 4.0 + 6.0) / 3)
    assert run.mean_time_s([0.80, 0.85]) == pytest.approx((4.0 + 40.0) / 2)  # never reached: the limit


def test_a_row_is_compared_by_the_mean_times_to_several_accuracies() -> None:
    found, _ = compared()
    assert steady_ratio_of(found, RULE, STATIC, 0.83).value == pytest.approx(0.7)  # type: ignore[union-attr]
    for run in list(found.outcomes[RULE]):  # 78, 79 and 80 % at the end of the run, 81, 82 and 83 % never
        points = [msgspec.structs.replace(point, accuracy=0.8) for point in run.points]
        found.outcomes[RULE].append(msgspec.structs.replace(run, points=points, limit_s=28.0))
        del found.outcomes[RULE][0]
    ratios = [(3 * 14 + 3 * 28) / (6 * 20), (3 * 15.4 + 3 * 28) / (6 * 22)]
    assert steady_ratio_of(found, RULE, STATIC, 0.83).value == pytest.approx(math.sqrt(math.prod(ratios)))  # type: ignore[union-attr]
    assert steady_ratio_of(compared(RULE)[0], RULE, STATIC, 0.83) is None


def test_two_seeds_have_students_interval() -> None:
    found = geometric_mean([0.5, 2.0])  # logarithms of mean 0 and standard error ln 2, t(1) = 12.706
    assert found.value == pytest.approx(1.0)
    assert (found.low, found.high) == pytest.approx((2**-12.706, 2**12.706), rel=1e-3)
    assert geometric_mean([0.5]).low is None


PREDICTED = Predicted(times_s={STATIC: [22.0], RULE: [17.0], PPO: [11.0]}, median_error=0.04)


def test_a_prediction_stands_beside_what_was_measured_with_its_error() -> None:
    found, _ = compared()
    assert predicted_ratio_of(PREDICTED, RULE) == pytest.approx(17 / 22)
    assert error_of(found, PREDICTED, RULE) == pytest.approx(17 / 22 / 0.7 - 1)
    assert error_of(found, PREDICTED, GOODPUT) is None
    assert error_of(found, Predicted(reason="too few windows"), RULE) is None
    targets = {target.name: target for target in targets_of([found], {CASE.name: PREDICTED})}
    assert targets["unequal-processors: rule / goodput"].met
    assert not targets["unequal-processors: error of the predicted ratio ppo / static"].met


def test_the_table_has_a_row_for_every_arm_and_says_what_was_searched() -> None:
    found, _ = compared()
    result = result_of(
        [found], {CASE.name: PREDICTED}, target_accuracy=0.83, grid_s=1.0, seeds=[1, 2], command="the command"
    )
    lines = markdown(result).splitlines()
    start = "| unequal-processors | plain | `ddp@32` | 30.0 / 33.0 | 1.50 [1.50, 1.50] | "
    assert lines[2].startswith(start)
    assert lines[2].endswith(" | 2.00 [2.00, 2.00] | 2.14 [2.14, 2.14] | 1.50 [1.50, 1.50] | - | - |")
    assert lines[3].startswith("| unequal-processors | static | `ddp@64` | 20.0 / 22.0 | - | 1.25")
    assert lines[7].startswith("| unequal-processors | rule | `rule` | 14.0 / 15.4 | 0.700 [0.700, 0.700] |")
    assert lines[7].endswith("| 0.773 | +10% |")
    assert "`ddp@256` > 20" in lines[-5]
    assert "`unequal-processors` 4.0%" in lines[-3]
    assert len(result.runs) == 5 + 3 + 2 + 4 + 6 + 4
    assert msgspec.json.decode(msgspec.json.encode(result), type=type(result)) == result


def test_an_arm_is_predicted_within_the_bounds_that_attach_gives_it() -> None:
    _, scenario, error = calibrated(CASE, DEMO, 0.83, 0.5)
    assert (scenario.target_accuracy, scenario.evaluate_every_s, scenario.time_limit_s) == (0.83, 1.0, 40.0)
    assert scenario.target_looks == LOOKS  # as real runs are judged
    assert (scenario.base_global_batch_size, scenario.learning_rate, scenario.workload) == (128, 0.02, "fashion-28-cnn")
    assert 0 < error < 1
    fixed, adaptive, learned = (
        task_of(scenario, arm, 1) for arm in (keeping_sum(SPLIT, 64), RECORDED, TargetArm(policy=PPO))
    )
    assert (fixed.scenario.min_local_batch_size, fixed.scenario.max_local_batch_size) == (1, 128)
    assert (adaptive.scenario.min_local_batch_size, adaptive.scenario.max_local_batch_size) == (1, 1024)
    assert (fixed.scenario.initial_local_batch_size, fixed.scenario.window_steps) == (64, 10)
    assert Path(learned.setting.policy_file).name == "ppo.safetensors"
    assert task_of(scenario, STATICS[0], 1).setting.policy == "static"
    local = task_of(scenario, static_local(64), 1)
    assert (local.setting.exchange, local.setting.options["every"]) == ("local", 4)
    assert local.scenario.permits_any_exchange


def test_a_row_pays_for_its_own_session_and_not_for_the_captured_one() -> None:
    workers = (Workers(samples_per_s=6000.0, overhead_s=0.02, count=3), Workers(samples_per_s=2000.0, overhead_s=0.001))
    scenario = msgspec.structs.replace(calibrated(CASE, DEMO, 0.83, 0.5).scenario, workers=workers)
    known = CalibratedCase(CASE, scenario, 0.05)
    arms = STATICS[0], TargetArm(policy="proportional"), TargetArm(policy="rule")
    plain, ours, tracked = (with_session_of(arm, known).per_worker for arm in arms)
    shares = [CASE.cores_of(rank, 0.0) for rank in range(4)]
    assert shares == [0.4, 0.4, 0.4, 0.15]
    whole_s = SESSION_S + WINDOW_S / 3
    assert [each.overhead_s for each in plain] == pytest.approx([0.02 - whole_s / 0.4] * 3 + [0.0])
    windows_s = WINDOW_S * (1 / 3 - 1 / 40)  # the first hosts take 25 ms for 32 samples: 40 steps take a second
    assert [each.overhead_s for each in ours] == pytest.approx([0.02 - windows_s / 0.4] * 3 + [0.0])
    assert tracked[0].overhead_s == pytest.approx(0.02 - (windows_s - TRACKING_S) / 0.4)
