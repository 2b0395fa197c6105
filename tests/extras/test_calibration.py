"""Calibration finds the known numbers of a virtual cluster again, and says what it cannot know."""

import asyncio
import json
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from tests.support import capture_files, examples, virtual
from tests.support.brokers import ConfiguredServer

from dynamix.arbitrator.policies.registry import policy_named
from dynamix.cli.main import main
from dynamix.cli.services import bus_environment
from dynamix.extras.calibration.fit import (
    Calibration,
    calibrate,
    fit_dwell_times,
    fit_rank,
    observe,
    scenario_text,
    slowdowns,
)
from dynamix.lab.simulator.episode import run_episode
from dynamix.lab.simulator.scenario import Congestion, Network, Scenario, Stragglers, Workers, suite_named
from dynamix.recording import capture
from dynamix.runtime.bus import Bus
from dynamix.schemas.messages import Job, MetricWindow, NodeRanks, Report
from dynamix.schemas.messages.allocation import Exchange

WORKLOAD = "fashion-14-mlp"
WORKERS = (
    Workers(samples_per_s=4000, overhead_s=0.002, saturation=60, count=2),
    Workers(samples_per_s=2000, overhead_s=0.040),
    Workers(samples_per_s=1000, overhead_s=0.004, saturation=48),
)
NETWORK = Network(bandwidth_mbit_s=1000, gradient_bytes=8_000_000, overlap=0.6)
COMMUNICATION_S = 0.0972
"""C: 2 * 3 / 4 * 8 MB at 125 MB/s, and 6 latencies of 50 us for each of 4 buckets."""


def known_scenario(**changes: Any) -> Scenario:
    """Two nodes, four workers of three speeds, a link that matters, 5 % jitter; 80 s."""
    fields: dict[str, Any] = {
        "workers": WORKERS,
        "network": NETWORK,
        "stragglers": Stragglers(jitter=0.05),
        "decision": virtual.FREE,
        "ranks_per_node": 2,
        "initial_local_batch_size": 64,
        "min_local_batch_size": 8,
        "max_local_batch_size": 200,
        "window_steps": 4,
        "target_accuracy": 1.0,
        "fixed_time_s": 80.0,
        "time_limit_s": 80.0,
        "evaluate_every_s": 50.0,
        "noise_every": 1000,
    }
    return virtual.scenario(**(fields | changes))


class KnownJob(NamedTuple):
    job: Job
    windows: list[MetricWindow]


@lru_cache
def known_job(scenario: Scenario, seed: int = 1) -> KnownJob:
    """The job with its windows; some 120 windows, a second of a core, and so much data that few are of two epochs."""
    reports: list[Report] = []
    data, policy = virtual.data(20_000), policy_named("random")
    episode = run_episode(scenario, policy, data=data, seed=seed, on_window=reports.extend)
    return KnownJob(episode.job, virtual.messages_of(reports)[0])


@lru_cache
def calibrated(scenario: Scenario) -> Calibration:
    job = known_job(scenario)
    return calibrate(job.windows, job.job, WORKLOAD)


def without_sync(window: MetricWindow) -> MetricWindow:
    unsplit = examples.training(compute_time_s=None, sync_time_s=None)
    ranks = tuple(msgspec.structs.replace(rank, training=unsplit) for rank in window.ranks)
    return msgspec.structs.replace(window, ranks=ranks)


def test_speeds_overheads_link_and_step_times_of_a_known_cluster_are_found() -> None:
    found = calibrated(known_scenario())
    truth = [group for group in WORKERS for _ in range(group.count)]
    for rank, worker, true in zip(found.ranks, found.scenario.workers, truth, strict=True):
        assert worker.samples_per_s == pytest.approx(true.samples_per_s, rel=0.03)
        assert worker.overhead_s == pytest.approx(true.overhead_s, abs=0.001)
        assert worker.saturation == pytest.approx(true.saturation, rel=0.1)
        assert rank.samples_per_s_error < 0.02 * rank.samples_per_s
    network, stragglers = found.scenario.network, found.scenario.stragglers
    assert found.communication_s == pytest.approx(COMMUNICATION_S, rel=0.1)
    assert network.bandwidth_mbit_s == pytest.approx(NETWORK.bandwidth_mbit_s, rel=0.1)
    assert network.latency_s == pytest.approx(NETWORK.latency_s, rel=1e-6)  # by the round trip times
    assert network.overlap == pytest.approx(NETWORK.overlap, abs=0.08)
    assert network.num_buckets == NETWORK.num_buckets
    assert network.gradient_bytes == pytest.approx(NETWORK.gradient_bytes, rel=1e-6)  # by the bytes sent
    assert stragglers.jitter == pytest.approx(0.05, abs=0.012)
    assert stragglers.factor == 1.0
    assert found.scenario.congestion is None
    assert len(found.comparisons) == found.num_windows > 80
    assert (found.num_left_out, found.median_error < 0.02, found.p90_error < 0.04) == (1, True, True)
    real = [comparison.step_time_s for comparison in found.comparisons]
    assert max(real) > 1.5 * min(real)  # there was something to predict
    for key in ("window_steps", "initial_local_batch_size", "max_local_batch_size", "ranks_per_node"):
        assert getattr(found.scenario, key) == getattr(known_scenario(), key)
    assert found.scenario.decision.cost_s == 0.0  # it is in the overheads


def test_stragglers_are_told_from_slow_workers() -> None:
    found = calibrated(known_scenario(stragglers=Stragglers(factor=4, mean_normal_s=15, mean_slow_s=5, jitter=0.05)))
    stragglers = found.scenario.stragglers
    assert stragglers.factor == pytest.approx(4, rel=0.05)
    assert 5 / 2.5 < stragglers.mean_slow_s < 5 * 2.5  # of some fifteen spells
    assert 15 / 2 < stragglers.mean_normal_s < 15 * 2
    rates = [worker.samples_per_s for worker in found.scenario.workers]
    assert rates == pytest.approx([4000, 4000, 2000, 1000], rel=0.04)
    assert any(comparison.slow_ranks for comparison in found.comparisons)
    assert found.median_error < 0.03


def test_congestion_is_told_from_a_slow_link() -> None:
    congestion = Congestion(factor=8, mean_clear_s=15, mean_congested_s=5, retransmits_per_s=200)
    found = calibrated(known_scenario(congestion=congestion))
    assert found.communication_s == pytest.approx(COMMUNICATION_S, rel=0.15)
    seen = found.scenario.congestion
    assert seen.factor == pytest.approx(8, rel=0.15)
    assert seen.retransmits_per_s == pytest.approx(200, rel=0.3)
    assert 5 / 3 < seen.mean_congested_s < 5 * 3
    assert any(comparison.is_congested for comparison in found.comparisons)


def test_what_sizes_that_do_not_vary_cannot_tell_is_said() -> None:
    job = known_job(known_scenario())
    first = [window for window in job.windows if window.window < 2]  # before the first decision rules
    same = [
        msgspec.structs.replace(window, window=20 * index + window.window) for index in range(10) for window in first
    ]
    found = calibrate(same, job.job, WORKLOAD)
    assert {rank.overhead_error_s for rank in found.ranks} == {None}
    assert [worker.overhead_s for worker in found.scenario.workers] == [0.0] * 4
    assert found.remarks[0].startswith("Not identifiable from these windows: overhead and rate of ranks 0, 1, 2, 3, ")
    assert found.scenario.workers[3].samples_per_s == pytest.approx(64 / (0.004 + 0.064), rel=0.05)


def test_other_bytes_than_the_models_are_remarked_on_and_the_models_own_are_not() -> None:
    found = calibrated(known_scenario())
    assert any("gradients of 8000000 bytes" in remark for remark in found.remarks)
    silent = [
        msgspec.structs.replace(
            window, ranks=tuple(msgspec.structs.replace(rank, network=None) for rank in window.ranks)
        )
        for window in known_job(known_scenario()).windows
    ]
    blind = calibrate(silent, known_job(known_scenario()).job, WORKLOAD)
    assert blind.scenario.network.gradient_bytes == 0
    assert "latency, as no round trip times were measured" in blind.remarks[0]


def test_a_single_worker_waits_for_no_network() -> None:
    job = known_job(known_scenario())
    alone = [
        msgspec.structs.replace(window, ranks=window.ranks[:1]) for window in job.windows if window.node == "virtual-0"
    ]
    single = msgspec.structs.replace(
        job.job,
        world_size=1,
        nodes=(NodeRanks(node="virtual-0", ranks=(0,)),),
        initial_local_batch_sizes=(64,),
        max_local_batch_sizes=(200,),
    )
    found = calibrate(alone, single, WORKLOAD)
    assert found.communication_s == 0.0
    assert found.scenario.world_size == 1
    assert found.scenario.workers[0].samples_per_s == pytest.approx(4000, rel=0.03)


def test_windows_that_are_not_whole_are_left_out() -> None:
    windows = known_job(known_scenario()).windows[:60]  # 30 windows of two nodes
    seen, num_left_out = observe(
        [windows[1], *windows[4:10], windows[11], *map(without_sync, windows[12:14]), *windows[14:]]
    )
    assert num_left_out == 3  # 0 is half there and cold, 5 half, 6 without sync times; 1 is not there at all
    assert seen.window.tolist() == [2, 3, 4, *range(7, 30)]
    assert seen.samples.shape == (26, 4)
    with pytest.raises(ValueError, match="7 of 8 windows can be used, 8 are the least"):
        observe(windows[:16])


def test_a_saturation_is_found_with_the_rest_where_it_shows_and_not_made_up() -> None:
    generator = np.random.default_rng(7)
    samples = generator.uniform(8, 256, 120)
    jitter = generator.lognormal(0, 0.02, 120)
    slow = np.where(generator.random(120) < 0.2, 3.0, 1.0)
    for overhead, saturation in ((0.002, 48), (0.040, 96)):
        line = fit_rank(samples, slow * jitter * (overhead + np.maximum(samples, saturation) / 1500))
        assert line.samples_per_s == pytest.approx(1500, rel=0.03)
        assert line.overhead_s == pytest.approx(overhead, abs=0.0015)
        assert line.saturation == pytest.approx(saturation, rel=0.05)
        assert abs(line.saturation - saturation) < 4 * line.saturation_error
    assert fit_rank(samples, slow * jitter * (0.040 + samples / 1500)).saturation == 0.0
    assert fit_rank(samples, slow * jitter * (0.002 + np.maximum(samples, 300) / 1500)).saturation == 0.0
    two = np.resize([32.0, 128.0, 128.0, 128.0], 1000)
    assert fit_rank(two, 0.040 + two / 1500).overhead_s == pytest.approx(0.040, abs=0.0015)


def test_stays_are_time_over_departures() -> None:
    on = np.array([0, 0, 1, 1, 1, 0, 0, 0, 1, 1], dtype=bool)[:, None]
    found = fit_dwell_times(on, np.where(on, 3.0, 1.0), np.full(10, 2.0))
    assert found.factor == 3.0
    assert found.mean_on_s == 10.0  # five windows, one departure: the last spell goes on
    assert found.mean_off_s == 5.0  # five windows, two departures
    assert fit_dwell_times(on[:4], np.ones((4, 1)), np.ones(4)) is None


@pytest.mark.parametrize("part", ["train", "heldout"])
def test_a_written_scenario_is_read_as_the_same(part: str, tmp_path: Path) -> None:
    for scenario in suite_named(part).scenarios:
        path = tmp_path / f"{scenario.name}.toml"
        path.write_text(scenario_text(scenario, "a comment"))
        assert Scenario.read(path) == scenario


def test_a_job_whose_gradients_were_coded_is_refused_and_one_where_they_may_have_been_is_remarked_on() -> None:
    known = known_job(known_scenario())
    coded = msgspec.structs.replace(known.job, exchange="lossy", initial_exchange=Exchange(codec="int8"))
    with pytest.raises(ValueError, match=r"exchanged gradients with int8.*calibrate to a run with exact training"):
        calibrate(known.windows, coded, WORKLOAD)
    permitted = msgspec.structs.replace(known.job, exchange="lossy")
    assert "the fit assumes exact training" in calibrate(known.windows, permitted, WORKLOAD).remarks[-1]
    assert not any("exact" in remark for remark in calibrate(known.windows, known.job, WORKLOAD).remarks)


def test_a_straggler_is_slow_where_it_has_enough_to_do() -> None:
    seen, _ = observe(known_job(known_scenario()).windows)
    samples = np.random.default_rng(7).integers(8, 128, (30, 1)).astype(np.float64)
    samples[::5] = 1.0
    times_s = 0.001 * samples
    times_s[::5] = 0.005  # instead of 1 ms: what a step costs beside its samples
    times_s[2::5] *= 3
    speed = fit_rank(samples[:, 0], times_s[:, 0])
    slowdown, slow = slowdowns([speed], seen._replace(samples=samples, busy_s=times_s))
    assert np.flatnonzero(slow).tolist() == list(range(2, 30, 5))
    assert slowdown[2::5] == pytest.approx(3.0, rel=0.02)


# --- dynamix calibrate


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The capture of a known job."""
    job = known_job(known_scenario())
    return capture_files.write(tmp_path / "job.dxc", capture_files.records_of([job.job, *job.windows]), job=job.job.job)


def test_a_capture_becomes_a_scenario_and_a_report(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario = tmp_path / "mine.toml"
    arguments = ["--workload", "fashion-14-mlp", "-o", str(scenario)]
    assert main(["calibrate", str(file), *arguments, "--json", str(tmp_path / "report.json")]) == 0
    output = capsys.readouterr()
    report = json.loads((tmp_path / "report.json").read_text())
    assert "± " in output.out
    assert report["median_error"] < 0.02
    assert len(report["comparisons"]) == report["num_windows"]
    read = Scenario.read(scenario)
    assert read.name == "mine"
    assert [worker.samples_per_s for worker in read.workers] == pytest.approx([4000, 4000, 2000, 1000], rel=0.04)
    assert [worker.saturation for worker in read.workers] == pytest.approx([60, 60, 0, 48], abs=3)
    assert "saturation, samples" in output.out
    assert report["scenario"]["workers"][3]["samples_per_s"] == read.workers[3].samples_per_s
    assert scenario.read_text().startswith("# Fitted to ")


async def test_a_job_on_the_bus_is_read_as_it_is_kept(
    server: ConfiguredServer, bus: Bus, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = known_job(known_scenario())
    for message in (job.job, *job.windows[:14]):
        await bus.publish(message)
    for variable, value in bus_environment(server.settings).items():
        monkeypatch.setenv(variable, value)
    arguments = ["--workload", "fashion-14-mlp"]
    assert await asyncio.to_thread(main, ["calibrate", job.job.job.rpartition("-")[0], *arguments]) == 1
    assert "6 of 7 windows can be used, 8 are the least" in capsys.readouterr().err
    assert await asyncio.to_thread(main, ["calibrate", "missing", *arguments]) == 1
    assert f"no job is called 'missing'; jobs on this broker: {job.job.job}" in capsys.readouterr().err


def test_what_cannot_be_used_is_said(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def calibrated(path: Path, workload: str = "fashion-14-mlp") -> str:
        assert main(["calibrate", str(path), "--workload", workload]) == 1
        return capsys.readouterr().err

    foreign = tmp_path / "foreign"
    foreign.write_bytes(b"DXR\x01")
    assert "this is no capture; `dynamix capture JOB -o FILE` makes one" in calibrated(foreign)
    assert "workload 'vgg' is not known" in calibrated(file, "vgg")
    records = list(capture.records(file))
    short = capture_files.write(tmp_path / "short.dxc", records[:7])
    assert "2 of 3 windows can be used, 8 are the least" in calibrated(short)
    forged = capture_files.write(tmp_path / "forged.dxc", [records[1]._replace(payload=b"XX" + records[1].payload[2:])])
    assert "holds what cannot be decoded: not a DYNAMIX message" in calibrated(forged)
