"""Jobs and windows as JSON documents, alarms, and a capture at any moment."""

from pathlib import Path

import msgspec
import pytest
from tests.support import examples
from tests.support.examples import applied, event

from dynamix.cli.documents import CapturedJob, alarms_of, alarms_of_job, job_document, overview, window_document
from dynamix.cli.services import Heartbeats
from dynamix.recording.job_view import JobView
from dynamix.schemas.messages import Live, Message

S = 10**9
NOW = 10 * S
DEMO = Path(__file__).parents[1] / "data" / "demo.dxc"


def view_of(*messages: Message) -> JobView:
    view = JobView(examples.JOB)
    for message in messages:
        view.fold(message, NOW)
    return view


def timed(rank: int, compute_s: float | None, sync_s: float | None) -> Message:
    window = examples.window("node-a", (rank,))
    training = examples.training(compute_time_s=compute_s, sync_time_s=sync_s, step_time_s=0.1)
    return msgspec.structs.replace(
        window, node=f"node-{rank}", ranks=(msgspec.structs.replace(window.ranks[0], training=training),)
    )


def test_what_every_rank_waits_is_communication_and_the_rest_the_barrier() -> None:
    found = job_document(view_of(timed(0, 0.05, 0.04), timed(1, 0.08, 0.01)), NOW)["ranks"]
    assert [(rank["communication_time_s"], rank["wait_time_s"]) for rank in found] == [
        (0.01, pytest.approx(0.03)),
        (0.01, 0.0),
    ]


def test_a_large_job_has_its_slowest_ranks_and_a_spread_of_sizes() -> None:
    ranks = tuple(range(100))
    window = examples.window("node-a", ranks)
    slow = tuple(
        msgspec.structs.replace(
            rank, training=examples.training(compute_time_s=0.01 * rank.rank, local_batch_size=rank.rank)
        )
        for rank in window.ranks
    )
    view = view_of(msgspec.structs.replace(window, ranks=slow), examples.action(0, deltas=(1,) * 60 + (-1,) * 40))
    document = job_document(view, NOW, most_ranks=64)
    assert (document["num_ranks_known"], [rank["rank"] for rank in document["ranks"]]) == (100, list(range(36, 100)))
    short = window_document(view.history[0], most_ranks=64)
    assert short["local_batch_sizes"] == {"min": 0, "median": 49.5, "max": 99}
    assert "deltas" not in short["action"]
    assert (short["action"]["num_ranks_more"], short["action"]["num_ranks_less"]) == (60, 40)
    assert len(window_document(view.history[0])["action"]["deltas"]) == 100


def test_running_jobs_are_listed_first_and_the_newest_before_the_others() -> None:
    views = []
    for name, phase in (("old", "running"), ("done", "ended"), ("new", "running"), ("dead", "running")):
        view = JobView(f"{name}-00000000")
        view.fold(msgspec.structs.replace(examples.job(), job=view.name, phase=phase), 0 if name == "dead" else NOW)
        views.append(view)
    views[3].heard_ns = 1
    document = overview(views, Heartbeats(), now_ns=NOW + 595 * S, now_s=0.0)
    assert [(row["name"][:3], row["phase"]) for row in document["jobs"]] == [
        ("new", "running"),
        ("old", "running"),
        ("dea", "silent"),
        ("don", "ended"),
    ]


def test_what_is_wrong_with_a_job_is_an_alarm_until_it_is_history() -> None:
    window = msgspec.structs.replace(examples.window(window=5), num_readings_lost=3)
    refused = applied(0, 2, num_refused={"too old": 2, "bounds": 0})
    view = view_of(examples.job(), window, examples.action(0), refused, event(5))
    texts = [alarm.text for alarm in alarms_of_job(view, NOW)]
    assert [text.partition(":")[0] for text in texts] == ["size-stuck", "the trainer refused 2 decisions", "node-a"]
    view = view_of(examples.job(), examples.window(window=4))
    assert ["no decision in 5 windows" in alarm.text for alarm in alarms_of_job(view, NOW)] == [True]
    (alarm,) = alarms_of_job(view, NOW + 300 * S)
    assert (alarm.level, alarm.text.partition(",")[0]) == ("error", "no message for 5 min")
    assert list(alarms_of_job(view, NOW + 4000 * S)) == []


def test_missing_services_dead_letters_and_a_node_without_a_collector_are_alarms() -> None:
    heartbeats = Heartbeats()
    for service in ("collector", "reward"):
        counters = {"dead_letters": 2} if service == "reward" else {}
        live = Live(service=service, instance="one", node="node-b", uptime_s=5.0, counters=counters)
        heartbeats.record(live, 100.0)
    found = alarms_of([view_of(examples.job())], heartbeats, now_ns=NOW, now_s=101.0)
    expected = [("error", "arbitrator"), ("warning", "services"), ("error", examples.JOB)]
    assert [(alarm.level, alarm.subject) for alarm in found] == expected
    assert found[-1].text.startswith("no collector on node-a: start it there")
    measured = view_of(examples.job(), examples.window())
    assert len(alarms_of([measured], heartbeats, now_ns=NOW, now_s=101.0)) == 2


def test_a_capture_that_is_cut_off_is_shown_as_far_as_it_goes(tmp_path: Path) -> None:
    cut = tmp_path / "cut.dxc"
    cut.write_bytes(DEMO.read_bytes()[:-100])
    captured = CapturedJob(cut)
    assert len(captured.notes) == 1
    assert captured.duration_s > 0
