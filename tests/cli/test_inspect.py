"""`dynamix inspect` and `dynamix replay`: the demo's capture, and captures that lack something."""

import json
from pathlib import Path

import msgspec
import pytest
from tests.support import capture_files, examples
from tests.support.examples import reward
from tests.support.recordings import DEMO, Matching, changed

from dynamix.cli.commands.inspect import Inspection, inspect
from dynamix.cli.main import main
from dynamix.recording.capture import CaptureWriter, Record, read_header, records
from dynamix.schemas import codec
from dynamix.schemas.chain import seal
from dynamix.schemas.codec import decode
from dynamix.schemas.messages import Action, Message
from dynamix.schemas.streams import ACTIONS

NODES = {"node-a": (0, 1), "node-b": (2, 3)}


def window_of(window: int, **changes: int) -> list[Message]:
    """What two nodes send of a window, without an action."""
    found: list[Message] = []
    for node, ranks in NODES.items():
        found += [examples.report(node, ranks, window, **changes), examples.window(node, ranks, window, **changes)]
        found += [msgspec.structs.replace(examples.state(node, ranks, window), **changes)]
        found += [reward(node, ranks, window, 0.5 if node == "node-a" else 0.7, **changes)]
    return found


def chained(num_windows: int) -> list[Action]:
    """Sealed actions, each behind the one before it."""
    actions: list[Action] = []
    for window in range(num_windows):
        actions.append(seal(examples.action(window), actions[-1].hash if actions else b""))
    return actions


def inspected(tmp_path: Path, messages: list[Message]) -> Inspection:
    return inspect(capture_files.write(tmp_path / "job.dxc", capture_files.records_of(messages)), keep_ranks=True)


def shown(path: Path, *arguments: str) -> int:
    return main(["inspect", str(path), *arguments])


def test_the_demo_is_shown_as_it_ran(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(DEMO) == 0
    output = capsys.readouterr().out
    assert "complete (ended); 181 messages" in output
    assert "job ended, closed: generation 0, 4 ranks on 1 node, 10 steps a window, sgd, policy proportional" in output
    assert "messages: action 30, applied 29, job 2, report 30, reward 30, state 30, window 30" in output
    assert "gaps: none, every window has all its messages" in output
    assert "chain of actions: unbroken over 30" in output
    assert "the same" in output


def test_json_says_all_and_nothing_else_is_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(DEMO, "--json", "-") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["end"]["num_records"] == said["num_records"] == 181
    assert said["header"]["job"] == said["jobs"][0]["job"]
    assert [window["window"] for window in said["windows"] if window["action"]] == list(range(30))
    first, third = said["windows"][0], said["windows"][2]
    sizes = first["action"]["local_batch_sizes"]
    assert first["action"]["deltas"] == [size - 128 for size in sizes]
    assert "carry" not in first["action"]
    assert first["applied"]["effective_window"] == 2
    assert [rank["metrics"]["training"]["num_samples"] for rank in third["ranks"]] == [10 * size for size in sizes]


def test_what_is_missing_is_named_by_kind_node_and_window(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    actions = chained(6)
    messages: list[Message] = [examples.job(), *window_of(0), actions[0], *window_of(1)[:-1], actions[1]]
    messages += [*window_of(4), actions[4], *window_of(5)]
    found = inspected(tmp_path, messages)
    assert [window for _, window, _ in found.gaps()] == [1, 2, 3, 5]
    assert found.gaps()[0] == (0, 1, ["reward of node-b"])
    assert shown(tmp_path / "job.dxc") == 1
    output = capsys.readouterr().out
    assert "missing in generation 0: reward of node-b of windows 1\n" in output
    assert "missing in generation 0: report of windows 2-3\n" in output
    assert "missing in generation 0: action of windows 2-3, 5\n" in output
    assert "the action for window 4 of generation 0 does not follow the one before it" in output


def test_restarts_stand_one_after_the_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    again = examples.job(generation=1)
    found = inspected(tmp_path, [examples.job(), *window_of(0), *window_of(1), again, *window_of(0, generation=1)])
    assert [(one.generation, one.window) for one in found.view.history] == [(0, 0), (0, 1), (1, 0)]
    path = tmp_path / "job.dxc"
    assert shown(path) == 0
    assert "\n   1:0 " in capsys.readouterr().out


def test_doubles_and_what_cannot_be_read_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = capture_files.records_of([examples.job(), *window_of(0), examples.report(window=0)])
    records.append(records[-1]._replace(sequence=99, payload=b"\xff not ours"))
    path = capture_files.write(tmp_path / "job.dxc", records)
    assert shown(path) == 1
    output = capsys.readouterr().out
    assert "repeated: 1 messages" in output
    assert f"malformed: '{records[-1].subject}': not a DYNAMIX message" in output


def test_a_damaged_or_cut_capture_is_shown_as_far_as_it_is_good(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = bytearray(DEMO.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path = tmp_path / "damaged.dxc"
    path.write_bytes(damaged)
    assert shown(path) == 1
    assert "records before it are good" in capsys.readouterr().out
    path.write_bytes(DEMO.read_bytes()[:-1])
    assert shown(path) == 1
    output = capsys.readouterr().out
    assert "INCOMPLETE; 181 messages" in output
    assert "the file is cut off here; the 181 records before it are good" in output
    assert shown(tmp_path / "nowhere") == 1
    assert "cannot read" in capsys.readouterr().err
    empty = capture_files.write(tmp_path / "empty.dxc", [])
    assert shown(empty) == 0


# --- dynamix replay: the verdict as an exit code, as text and as JSON ---


def played(path: Path, *arguments: str) -> int:
    return main(["replay", str(path), *arguments])


def test_the_exit_code_tells_equal_incomplete_and_unreadable_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert played(DEMO, "--into", "reward") == 0
    assert "EQUAL: of" in capsys.readouterr().out
    middle = next(record.sequence for record in records(DEMO) if Matching("window", 10)(record))
    later = changed(
        DEMO, tmp_path / "later.dxc", lambda one: one if one.stream != "FEED" or one.sequence >= middle else None
    )
    assert played(later) == 1
    output = capsys.readouterr().out
    assert "INCOMPLETE: of 19" in output
    assert "11 recorded actions were not compared" in output
    data = bytearray(DEMO.read_bytes())
    data[-100] ^= 1
    (tmp_path / "damaged.dxc").write_bytes(data)
    assert played(tmp_path / "damaged.dxc") == played(tmp_path / "nothing.dxc") == 2
    assert "records before it are good" in capsys.readouterr().err


def test_different_is_one_and_shows_both_sides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes: list[int] = []

    def with_other_sizes(record: Record) -> Record:
        if not Matching("action", 5)(record):
            return record
        action = decode(Action, record.subject, record.payload)
        sizes.extend(action.local_batch_sizes)
        other = examples.with_levers(action, local_batch_sizes=(*sizes[:-1], sizes[-1] + 1))
        return record._replace(payload=codec.encode(other))

    other, target = changed(DEMO, tmp_path / "other.dxc", with_other_sizes), tmp_path / "out.json"
    assert played(other, "--json", str(target)) == 1
    output = capsys.readouterr().out
    assert "DIFFERENT: of 30 actions 29 are equal byte for byte" in output
    assert "first difference: action for window 5 of generation 0" in output
    row = next(line for line in output.splitlines() if "allocation.local_batch_sizes[3]" in line)
    assert row.split() == ["allocation.local_batch_sizes[3]", str(sizes[3] + 1), str(sizes[3])]
    document = json.loads(target.read_text())
    assert (document["equal"], document["bytes_equal"], document["decisions_equal"]) == (False, False, False)
    assert document["counts"]["differences"][0]["window"] == 5


def test_equal_decisions_are_enough_for_another_processor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def with_other_carry(record: Record) -> Record:
        if record.stream != ACTIONS.name:
            return record
        action = decode(Action, record.subject, record.payload)
        return record._replace(payload=codec.encode(msgspec.structs.replace(action, carry=b"another")))

    header = read_header(DEMO)
    elsewhere = msgspec.structs.replace(header.fingerprint, cpu="another/1/1")
    path = tmp_path / "elsewhere.dxc"
    with CaptureWriter(path, msgspec.structs.replace(header, fingerprint=elsewhere)) as writer:
        for record in records(DEMO):
            writer.write_record(with_other_carry(record))
    assert played(path) == 0
    said = capsys.readouterr()
    assert "captured by another build or processor" in said.err
    assert "cpu: another/1/1 there" in said.err
    assert "EQUAL: of 30 actions 0 are equal byte for byte, 30 in what they say only" in said.out
