"""Runs of one name are compared by the training time to the accuracy that all of them reached."""

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.support import examples

from dynamix.arbitrator.deciding.run_times import RunKind, RunTimes
from dynamix.arbitrator.shown import ShownDecisions
from dynamix.runtime.metrics import ServiceMetrics


def run(times: RunTimes, job: str, windows: list[tuple[float, float | None]], policy: str = "rule") -> None:
    for time_s, accuracy in windows:
        times.record_window(job, time_s, accuracy)
    times.end_run(job, policy)


def test_the_times_are_those_to_the_best_accuracy_that_all_reached() -> None:
    times = RunTimes()
    run(times, "mnist-a", [(1.0, None), (1.0, 0.5), (1.0, 0.8), (9.0, 0.9)])  # 0.8 after 3 s
    run(times, "mnist-b", [(2.0, 0.7), (2.0, 0.6), (2.0, 0.85)])  # after 6 s
    run(times, "mnist-c", [(9.0, 0.8)])  # after 9 s
    assert times.variations() == {RunKind("mnist", "rule"): pytest.approx(6**0.5 / 6)}


def test_only_runs_of_one_name_and_policy_are_compared_and_only_with_an_accuracy() -> None:
    times = RunTimes()
    run(times, "mnist-a", [(1.0, 0.5)])
    run(times, "mnist-b", [(1.0, 0.5)])
    run(times, "mnist-c", [(1.0, 0.5)], policy="split")
    run(times, "other-d", [(1.0, 0.5)])
    run(times, "mnist-e", [(1.0, None)])
    assert times.variations() == {}


def test_a_last_window_that_comes_after_the_end_counts() -> None:
    times = RunTimes()
    for job in ("mnist-a", "mnist-b", "mnist-c"):
        times.record_window(job, 1.0, None)
        times.end_run(job, "rule")
        times.record_window(job, 1.0, 0.8)
    assert times.variations() == {RunKind("mnist", "rule"): 0.0}


def test_a_state_that_comes_after_the_end_of_its_job_does_not_bring_it_back() -> None:
    metrics = ServiceMetrics("arbitrator")
    metrics.is_served = True
    shown = ShownDecisions(metrics)

    def jobs() -> set[str]:
        families = text_string_to_metric_families(metrics.exposition("")[0].decode())
        samples = [sample for family in families for sample in family.samples]
        return {sample.labels["training_job"] for sample in samples if "training_job" in sample.labels}

    state, job = examples.state(), examples.job()
    shown.record_state(state)
    assert jobs() == {job.job}
    shown.record_end(msgspec.structs.replace(job, phase="ended", end_reason="completed"))
    shown.record_state(state)
    assert jobs() == set()
    shown.record_state(msgspec.structs.replace(state, generation=1))  # started again under the same id
    assert jobs() == {job.job}
