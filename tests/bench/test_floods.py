import math
import re
from pathlib import Path

import msgspec
import pytest
from bench.floods.__main__ import (
    BEGIN,
    BEGIN_KEYS,
    BEGIN_ROLES,
    END,
    HEADINGS,
    ROLE_HEADINGS,
    cells_of,
    role_cells,
    targets_of,
)
from bench.floods.measurement import HONEST_JOBS, Delays, FloodResult, delays_of
from bench.floods.roles import (
    ALERTS,
    HOSTILE_USERS,
    MAX_JUNK_PER_S,
    MAX_REQUESTS_PER_S,
    MESSAGES_OF_A_STATE,
    RATES_OVER_S,
    RoleReport,
    RoleResult,
    Seen,
    floods_of,
    subjects_of_role,
)
from bench.floods.senders import FLOODS, LARGE_RANKS, Sent, job_on_one_node, measured_of
from bench.harness.steady_job import NODE
from bench.harness.tables import markdown
from tests.support.benches import ROOT, run_bench

from dynamix.runtime.bus.authority import permissions_of

RULES = (ROOT / "deploy" / "prometheus" / "alerts.yaml").read_text()
CALM = Delays(num_windows=50, median_s=0.01, p95_s=0.02, longest_s=0.03)
RESULT = FloodResult(
    flood="junk",
    count=2260,
    sent=Sent(accepted=2260, refused=0, num_bytes=1_100_620_000, seconds=6.0),
    calm=CALM,
    flooded=msgspec.structs.replace(CALM, longest_s=0.9),
    num_out_of_chain=0,
)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_flood_is_sent_and_every_window_of_the_honest_job_is_decided(tmp_path: Path) -> None:
    (tmp_path / "floods.md").write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    document = ["--document", str(tmp_path / "floods.md")]
    found = run_bench("floods", tmp_path / "r.json", "--size", "0.02", "--calm", "1", "--after", "1", *document)
    results = msgspec.convert(found["floods"], list[FloodResult])
    sent = {one.flood: (one.count, one.sent.accepted, one.sent.refused) for one in results}
    assert sent == {
        "jobs": (200, 400, 0),
        "consumers": (20, 20, 0),
        "specifications": (3, 0, 3),
        "junk": (45, 45, 0),
        "reports": (5, 5, 0),
    }
    for one in results:
        assert one.num_out_of_chain == 0
        assert one.calm.num_windows > 0
        assert 0 < one.flooded.median_s <= one.flooded.p95_s <= one.flooded.longest_s
        assert math.isfinite(one.sent.seconds)
    assert "old" not in (tmp_path / "floods.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_honest_jobs_with_keys_are_decided_while_a_key_floods_with_small_messages(tmp_path: Path) -> None:
    (tmp_path / "floods.md").write_text(f"{BEGIN}\nother\n{END}\n{BEGIN_KEYS}\nold\n{END}\n")
    options = ["--keys", "--size", "0.01", "--calm", "1", "--after", "1", "--document", str(tmp_path / "floods.md")]
    found = run_bench("floods", tmp_path / "r.json", *options)
    results = {one.flood: one for one in msgspec.convert(found["floods"], list[FloodResult])}
    assert {name: one.count for name, one in results.items()} == {
        "small": 10_000,
        "small-reports": 5_000,
        "own-reports": 500,
    }
    for one in results.values():
        assert one.num_out_of_chain == 0
        assert one.sent.accepted + one.sent.refused == one.count
        assert one.calm.num_windows > 0
        assert one.flooded.num_windows > 0
    text = (tmp_path / "floods.md").read_text()
    assert "other" in text
    assert "old" not in text


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("keys", "flood", "count"), [(["--keys"], "small", 1000), ([], "junk", 2)])
def test_floods_of_three_servers_are_measured(tmp_path: Path, keys: list[str], flood: str, count: int) -> None:
    options = [*keys, "--servers", "3", "--flood", flood, "--size", "0.001", "--calm", "1", "--after", "1"]
    (one,) = msgspec.convert(run_bench("floods", tmp_path / "r.json", *options)["floods"], list[FloodResult])
    assert (one.flood, one.count, one.num_out_of_chain) == (flood, count, 0)
    assert one.flooded.num_windows > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_a_role_may_not_do_is_refused_and_logged_and_honest_jobs_are_decided(tmp_path: Path) -> None:
    (tmp_path / "floods.md").write_text(f"{BEGIN}\nother\n{END}\n{BEGIN_ROLES}\nold\n{END}\n")
    options = ["--role", "collector", "--role", "watcher", "--size", "0.01", "--calm", "1", "--after", "1"]
    found = run_bench("floods", tmp_path / "r.json", *options, "--document", str(tmp_path / "floods.md"))
    collector, watcher = msgspec.convert(found["roles"], list[RoleReport])
    assert [one.flood for one in collector.results] == [*floods_of("collector")]
    for report, may in ((collector, {"requests", "own-kinds"}), (watcher, {"requests"})):
        for one in report.results:
            assert one.num_out_of_chain == 0
            assert one.flooded.num_windows > 0
            assert one.sent.denied == (0 if one.flood in may else one.sent.accepted + one.sent.refused), one.flood
            assert one.num_violations == one.sent.denied
    kinds = {one.flood: one for one in collector.results}["own-kinds"]
    assert "DynamixDeadLetters" in kinds.alerts
    text = (tmp_path / "floods.md").read_text()
    assert "other" in text
    assert "old" not in text
    assert "| watcher | none |" in text


@pytest.mark.parametrize("role", HOSTILE_USERS)
def test_what_is_sent_of_a_roles_kinds_is_permitted_and_in_an_honest_jobs_name_where_it_may(role: str) -> None:
    user = HOSTILE_USERS[role]
    allowed = [re.sub(r"{{.*?}}", user.limits[0] if user.limits else "", one) for one in permissions_of(user.role)[0]]
    sent = subjects_of_role(role)
    assert all(any(matches(pattern, subject) for pattern in allowed) for subject in sent)
    assert bool(sent) == (role != "watcher")
    in_anothers_name = [subject for subject in sent if HONEST_JOBS[0].replace("-", ".") in subject]
    assert bool(in_anothers_name) == (role in ("collector", "reward", "learner"))


def matches(pattern: str, subject: str) -> bool:
    """As the broker compares them; `>` stands last."""
    wanted, given = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        wanted, given = wanted[:-1], given[: len(wanted) - 1]
    return len(wanted) == len(given) and all(one in ("*", token) for one, token in zip(wanted, given, strict=True))


def test_alerts_are_raised_by_the_numbers_that_the_rules_name() -> None:
    for counter, alert in ALERTS.items():
        assert f"alert: {alert}\n        expr: increase(dynamix_{counter}_total[" in RULES
    minutes = round(RATES_OVER_S / 60)
    assert f"rate(dynamix_broker_requests_total[{minutes}m]) > {MAX_REQUESTS_PER_S}\n" in RULES
    assert f"sum by (instance) (rate(dynamix_stream_stored_total[{minutes}m]))\n" in RULES
    assert f"- on (instance) {MESSAGES_OF_A_STATE} * (" in RULES
    assert f"dynamix_stream_stored_total[{minutes}m]))) > {MAX_JUNK_PER_S}\n" in RULES
    assert "expr: dynamix_feed_full_ratio > 0.9 and dynamix_feed_span_seconds < 600\n" in RULES


def test_alerts_are_told_from_what_was_seen_before_and_after_a_flood() -> None:
    before = Seen(0.0, {"DynamixDeadLetters": 3, "DynamixFeedFlooded": 0}, 100, 1000, 50)
    assert before._replace(time_s=10.0).raised_since(before) == ()
    crowded = before._replace(time_s=10.0, counted={"DynamixDeadLetters": 3, "DynamixFeedFlooded": 1})
    assert crowded.raised_since(before) == ("DynamixFeedFlooded",)
    assert before._replace(time_s=10.0, num_requests=36_100).raised_since(before) == ()
    assert before._replace(time_s=10.0, num_requests=36_101).raised_since(before) == ("DynamixRequestsFlooded",)
    stored = before._replace(time_s=10.0, num_stored=1000 + 24_000 + 12_000, num_states=150)  # 10 a second
    assert stored.raised_since(before) == ()
    assert stored._replace(num_stored=stored.num_stored + 1).raised_since(before) == ("DynamixStreamJunk",)


def test_floods_that_are_wholly_refused_are_one_row_with_the_longest_delay() -> None:
    def result(flood: str, accepted: int, longest_s: float, *alerts: str) -> RoleResult:
        refused = 100 - accepted
        return RoleResult(
            role="reward",
            flood=flood,
            what=flood,
            count=100,
            sent=Sent(accepted=accepted, refused=refused, num_bytes=0, seconds=1.0, denied=refused),
            flooded=msgspec.structs.replace(CALM, longest_s=longest_s),
            num_out_of_chain=0,
            num_violations=refused,
            alerts=alerts,
        )

    results = (result("junk", 0, 0.2), result("own-kinds", 100, 0.3, "DynamixDeadLetters"), result("small", 0, 0.1))
    assert role_cells(RoleReport(role="reward", calm=CALM, results=results)) == [
        ["reward", "none", "", "", "10 / 20 / 30", ""],
        ["reward", "100 own-kinds", "100", "0", "10 / 20 / 300", "DynamixDeadLetters"],
        ["reward", "junk, small", "0", "200", "10 / 20 / 200", "200 refusals logged"],
    ]


def test_delays_are_summed_up() -> None:
    found = delays_of([0.1, 0.2, 0.3, 0.4, 9.0])
    assert (found.num_windows, found.median_s, found.longest_s) == (5, 0.3, 9.0)
    assert found.p95_s == pytest.approx(7.28)


def test_a_delay_above_a_second_and_a_broken_chain_are_found() -> None:
    assert all(target.met for target in targets_of([RESULT]))
    slow = msgspec.structs.replace(RESULT, flooded=msgspec.structs.replace(CALM, longest_s=1.1), num_out_of_chain=1)
    assert [str(target) for target in targets_of([slow])] == [
        "junk: longest delay, s: 1.1, target <= 1 MISSED",
        "junk: actions out of their chain: 1, target <= 0 MISSED",
    ]


def test_floods_go_to_the_collector_of_the_honest_job() -> None:
    job = job_on_one_node("crowd", LARGE_RANKS)
    report = measured_of(job).report
    assert (report.node, len(report.rows), job.world_size) == (NODE, 4096, 4096)


@pytest.mark.parametrize(("file", "with_key"), [("floods.json", False), ("floods-keys.json", True)])
def test_the_documented_table_is_of_the_documented_figures(file: str, *, with_key: bool) -> None:
    found = msgspec.json.decode((ROOT / "docs" / file).read_bytes())
    results = msgspec.convert(found["floods"], list[FloodResult])
    wanted = {name: flood.full for name, flood in FLOODS.items() if flood.with_key == with_key}
    assert {one.flood: one.count for one in results} == wanted
    cells = [cells_of(result) for result in results]
    assert markdown(HEADINGS, cells, num_left=1) in (ROOT / "docs" / "floods.md").read_text()


def test_the_documented_roles_are_of_the_documented_figures() -> None:
    found = msgspec.json.decode((ROOT / "docs" / "floods-roles.json").read_bytes())
    reports = msgspec.convert(found["roles"], list[RoleReport])
    assert [one.role for one in reports] == [*HOSTILE_USERS]
    cells = [row for report in reports for row in role_cells(report)]
    assert markdown(ROLE_HEADINGS, cells, num_left=2) in (ROOT / "docs" / "floods.md").read_text()
