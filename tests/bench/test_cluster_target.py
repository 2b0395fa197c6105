"""Time to a target on real clocks: once as a user runs it, then its thinking on made-up runs."""

import argparse
import asyncio
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from bench.cluster.target.arms import (
    GOODPUTS,
    PLAIN,
    ROWS,
    RULE,
    SPLIT,
    STATIC,
    STATICS,
    TargetArm,
    keeping_sum,
)
from bench.cluster.target.campaign import num_runs
from bench.cluster.target.cases import CASES, TargetCase
from bench.cluster.target.command import RunKeeper, TargetForecast, main
from bench.cluster.target.messages import Attached, CheckIn, CheckInAnswer, exchange, read_frame, write_frame
from bench.cluster.target.outcomes import (
    Outcomes,
    TargetOutcome,
    TargetPoint,
    TargetRun,
    is_at_target,
    is_behind,
)
from bench.cluster.target.ranks import WORKLOAD
from bench.cluster.target.runner import NUM_SCREENED, HeldOut, check_steered
from bench.hosts.cgroups import find_hierarchies
from bench.hosts.namespace import DIRECTORY
from bench.hosts.services import ClusterError
from tests.support.benches import ROOT, run_bench
from tests.support.brokers import until
from tests.support.target_runs import CASE, LOCAL, MadeUpRuns, compared, outcome_of

from dynamix.lab.workloads import Part, workload_named

SMALL = ("--target", "0.4", "--grid", "0.5", "--seeds", "1", "--limit", "120", "--case", "equal", "--no-prediction")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--grid nan", "--grid above 0, --limit not below 0, both finite"),
        ("--grid inf", "--grid above 0, --limit not below 0, both finite"),
        ("--limit inf", "--grid above 0, --limit not below 0, both finite"),
        ("--limit nan", "--grid above 0, --limit not below 0, both finite"),
        ("--seeds 0", "--seeds and --virtual-seeds are at least 1"),
        ("--virtual-seeds 0", "--seeds and --virtual-seeds are at least 1"),
    ],
)
def test_numbers_that_no_comparison_can_use_are_refused(
    words: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*words.split(), "--work", str(tmp_path / "work")])
    assert sentence in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_missing_data_is_a_sentence_and_no_missed_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(_: argparse.Namespace) -> None:
        HeldOut.read(str(tmp_path))

    monkeypatch.setattr("bench.cluster.target.command.measure", measure)
    assert main(["--work", str(tmp_path / "work")]) == 2
    assert "Fashion-MNIST is missing" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.bpf
@pytest.mark.timeout(300)
def test_real_ranks_train_to_an_accuracy_and_what_was_run_is_not_run_again(tmp_path: Path) -> None:
    arguments = (*SMALL, "--arm", PLAIN, "--arm", RULE, "--work", str(tmp_path / "work"))
    result = run_bench("cluster", tmp_path / "first.json", *arguments, "--png", str(tmp_path / "figure.png"))["result"]
    assert [row[1:3] for row in result["rows"]] == [[PLAIN, "`ddp@32`"], [RULE, "`rule`"]]
    for run in result["runs"]:
        accuracies, last = [point["accuracy"] for point in run["points"]], run["points"][-1]
        *before, reached = [sum(accuracies[end - 3 : end]) / 3 for end in range(3, len(accuracies) + 1)]
        assert reached >= 0.4 > max(before, default=0)
        assert run["time_to_target_s"] == last["trained_s"] < run["wall_s"]
        assert last["num_samples"] > 0
    captures = sorted(path.name.split("-")[1] for path in (tmp_path / "work" / "runs").glob("*.dxc"))
    assert captures == ["rule"]  # plain DDP says nothing on the bus, and predictions are not asked for
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    again = run_bench("cluster", tmp_path / "second.json", *arguments)["result"]
    assert again["runs"] == result["runs"]


@pytest.mark.slow
@pytest.mark.bpf
async def test_an_interrupt_ends_the_ranks_and_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.cluster", *SMALL, "--arm", PLAIN, "--work", str(tmp_path)]
    bench = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stderr=asyncio.subprocess.PIPE)
    mark = f"dynamix-hosts-{bench.pid}-"
    places = (DIRECTORY, *find_hierarchies().roots)

    def left() -> list[Path]:
        return [path for place in places if place.exists() for path in place.iterdir() if path.name.startswith(mark)]

    def pids() -> set[str]:
        """Processes of the hosts: a collector each, and later a rank."""
        return {pid for path in left() for file in path.glob("*/cgroup.procs") for pid in file.read_text().split()}

    await until(lambda: len(pids()) == 8)
    busy = pids()
    bench.send_signal(signal.SIGINT)
    await bench.communicate()
    assert bench.returncode == 130
    assert left() == []
    assert not any(is_running(pid) for pid in busy)


def is_running(pid: str) -> bool:
    return Path("/proc", pid).exists()


def test_only_an_accuracy_near_the_target_is_that_of_all_held_out_samples() -> None:
    torch.manual_seed(1)
    workload = workload_named(WORKLOAD)
    model, inputs = workload.model(), torch.randn(2 * NUM_SCREENED, 1, 28, 28)
    right = model(inputs).argmax(1)
    labels = torch.cat([right[:NUM_SCREENED], (right[NUM_SCREENED:] + 1) % 10])
    parameters = torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy().tobytes()
    held_out = HeldOut(Part(inputs, labels))
    assert held_out.accuracy(parameters, target=0.9) == pytest.approx(0.5, abs=0.01)
    labels[: NUM_SCREENED // 2] += 1
    assert held_out.accuracy(parameters, target=0.9) == pytest.approx(0.5, abs=0.01)
    assert held_out.accuracy(parameters, target=0.5) == pytest.approx(0.25, abs=0.01)


def test_a_processor_slows_down_at_its_time_and_links_have_their_rates() -> None:
    case = CASES["slow-down"]
    assert [case.cores_of(1, at) for at in (0.0, 4.9, 5.0, 60.0)] == [0.4, 0.4, 0.13, 0.13]
    assert case.cores_of(0, 60.0) == 0.4
    link = CASES["slow-link"].link_of(2)
    assert link is not None
    assert link.rate == 30e6
    assert CASES["slow-link"].link_of(1) is None


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"slow_links": {3: "20"}}, "not a rate"),
        ({"slow_cpus": {4: 0.1}}, "rank 4 does not exist"),
        ({"num_hosts": 1}, "at least 2"),
    ],
)
def test_a_case_that_cannot_be_run_says_why(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        TargetCase(name="wrong", title="", **arguments)


def test_the_learning_rate_follows_one_base_and_a_session_scales_it_by_itself() -> None:
    assert TargetArm(policy=None).learning_rate(4) == 0.02
    assert TargetArm(policy=None, local_batch_size=128).learning_rate(4) == 0.04
    assert keeping_sum(SPLIT, 128).learning_rate(4) == 0.02
    assert [arm.label for arm in (STATICS[1], GOODPUTS[1], keeping_sum(SPLIT, 64), TargetArm(policy=RULE))] == [
        *("ddp@64", "goodput:track=1,hysteresis=0", "split@64", "rule"),
    ]


async def test_a_rank_waits_for_the_answer_to_its_message() -> None:
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    said = CheckIn(trained_s=1.5, num_steps=9, num_samples=99, local_batch_sizes=(1, 2), parameters=b"\0" * 100_000)
    with theirs:
        answer = asyncio.create_task(asyncio.to_thread(exchange, theirs, said))
        assert await read_frame(reader, CheckIn) == said
        write_frame(writer, CheckInAnswer(stop=True, accuracy=0.5))
        assert await answer == CheckInAnswer(stop=True, accuracy=0.5)
        gone = asyncio.create_task(asyncio.to_thread(exchange, theirs, Attached(rank=1)))
        await read_frame(reader, Attached)
        writer.close()
        with pytest.raises((EOFError, ConnectionResetError)):
            await gone


def test_baselines_are_searched_up_to_the_best_so_far_and_arms_run_in_turn() -> None:
    runs = MadeUpRuns()
    found, done = compared(runs=runs)
    assert done[0] == ("random", 1, 20.0)
    assert done[1:7] == [
        ("ddp@32", 1, 40),
        ("ddp@64", 1, 30),
        ("ddp@128", 1, 20),
        ("ddp@256", 1, 20),
        ("ddp@16", 1, 20),
        ("ddp@8", 1, 20),
    ]
    assert [runs.best_runs[1:7], runs.best_runs[7][1]] == [
        [("ddp@32", None), ("ddp@64", 30), ("ddp@128", 20), ("ddp@256", 20), ("ddp@16", 20), ("ddp@8", 20)],
        None,
    ]
    assert [label for label, *_ in done[7:10]] == [arm.label for arm in GOODPUTS]
    assert [label for label, *_ in done[10:16]] == ["proportional@64", "split@64", "rule", "ppo", *LOCAL]
    second = ["ppo", "rule", "split@64", "goodput:track=1,hysteresis=0", "proportional@64", "ddp@64", "ddp@32"]
    assert done[16:] == [(label, 2, 40) for label in [*reversed(LOCAL), *second]]
    assert len(done) == num_runs(ROWS, 2) == 25
    assert {row: arm.label for row, arm in found.arms.items()}[STATIC] == "ddp@64"
    assert [run.counted_s for run in found.outcomes[RULE]] == pytest.approx([14.0, 15.4])
    assert [run.counted_s for run in found.searched[STATIC]] == [30, 20, 20, 20, 20, 20]


def test_one_arm_alone_runs_with_what_it_starts_from() -> None:
    found, done = compared(RULE, num_seeds=1)
    assert [label for label, *_ in done] == ["random", "rule"]
    assert list(found.outcomes) == [RULE]
    found, done = compared(SPLIT, num_seeds=1)
    assert [label for label, *_ in done] == ["random", *(arm.label for arm in STATICS), "split@64"]
    assert len(done) == num_runs([SPLIT], 1)
    assert len(compared(PLAIN, STATIC)[1]) == num_runs([PLAIN, STATIC], 2)


def _curve(*accuracies: float) -> list[TargetPoint]:
    return [
        TargetPoint(trained_s=float(at), accuracy=accuracy, num_steps=9, num_samples=99, local_batch_sizes=(9, 9))
        for at, accuracy in enumerate(accuracies, 1)
    ]


def test_the_target_is_reached_by_the_mean_of_three_looks() -> None:
    assert not is_at_target(_curve(0.9, 0.9), 0.85)
    assert not is_at_target(_curve(0.8, 0.83, 0.86), 0.85)
    assert is_at_target(_curve(0.2, 0.84, 0.86, 0.85), 0.85)


def test_a_run_far_below_where_the_best_one_was_is_given_up() -> None:
    best = _curve(*(0.04 * at for at in range(1, 21)))  # 20 looks, 0.8 at the end
    far, near = ([point.accuracy - less for point in best] for less in (0.06, 0.04))
    assert not any(is_behind(_curve(*far[:number]), best) for number in range(8))
    assert all(is_behind(_curve(*far[:number]), best) for number in range(8, 21))
    assert not any(is_behind(_curve(*near[:number]), best) for number in range(21))
    assert not is_behind(_curve(*far), [])
    assert not is_behind(_curve(*far), _curve(0.9))  # which it has outlived: that is for its limit to say


def test_a_kept_run_answers_for_shorter_limits_and_other_code_or_seeds_do_not(tmp_path: Path) -> None:
    kept, arm = Outcomes(tmp_path / "runs"), STATICS[0]
    run = TargetRun(case=CASE, arm=arm, seed=1, target_accuracy=0.83, grid_s=1.0)
    assert kept.get(run) is None
    missed = outcome_of(arm, 1, 99.0, 20.0)
    kept.keep(run, missed)
    assert kept.get(run) == missed
    assert missed.answers(20)
    assert missed.answers(15)
    assert not missed.answers(40)
    reached = outcome_of(arm, 1, 30.0, 40.0)
    kept.keep(run, reached)
    longer = msgspec.structs.replace(CASE, time_limit_s=99.0, title="in other words")
    assert kept.get(msgspec.structs.replace(run, case=longer)) == reached
    for changes in (
        {"seed": 2},
        {"grid_s": 2.0},
        {"target_accuracy": 0.8},
        {"arm": STATICS[1]},
        {"case": CASES["equal"]},
    ):
        assert kept.get(msgspec.structs.replace(run, **changes)) is None
    assert kept.capture_of(run).parent == tmp_path / "runs"


def test_time_left_is_that_of_the_runs_so_far() -> None:
    forecast = TargetForecast(10)
    assert str(forecast) == "run 1 of 10"
    forecast.count_run(None)
    forecast.count_run(30.0)
    forecast.count_run(90.0)
    assert str(forecast) == "run 4 of 10, some 7 min left"


async def test_a_run_that_two_rows_ask_for_is_run_and_counted_once(tmp_path: Path) -> None:
    class Runner:
        async def run(self, run: TargetRun, limit_s: float, *_: object) -> TargetOutcome:
            return outcome_of(run.arm, run.seed, 12.0, limit_s)

    options = argparse.Namespace(target=0.8, grid=1.0)
    keeper = RunKeeper(Runner(), Outcomes(tmp_path), options, 2)  # type: ignore[arg-type]
    for arm in (STATICS[0], STATICS[0], STATICS[1]):
        await keeper(CASE, arm, 1, 40.0)
    assert keeper.forecast.num_done == keeper.forecast.num_total == 2


@pytest.mark.parametrize(("num_windows", "num_applied"), [(4, 0), (24, 10), (24, 22), (1, 0)])
def test_a_run_whose_windows_were_decided_is_kept(num_windows: int, num_applied: int, tmp_path: Path) -> None:
    run = TargetRun(case=CASE, arm=TargetArm(policy="rule"), seed=1, target_accuracy=0.83, grid_s=1.0)
    check_steered(run, num_windows * CASE.num_hosts, num_applied, tmp_path)


@pytest.mark.parametrize(("num_windows", "num_applied"), [(6, 0), (24, 9), (33, 0), (0, 0)])
def test_a_run_that_nobody_steered_is_refused(num_windows: int, num_applied: int, tmp_path: Path) -> None:
    run = TargetRun(case=CASE, arm=TargetArm(policy="rule"), seed=1, target_accuracy=0.83, grid_s=1.0)
    with pytest.raises(ClusterError, match=f"only {num_applied} decisions were applied in {num_windows} windows"):
        check_steered(run, num_windows * CASE.num_hosts, num_applied, tmp_path)
