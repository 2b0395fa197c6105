"""`dynamix replay`: the verdict as an exit code, as text and as JSON."""

import json
from pathlib import Path

import msgspec
import pytest
from tests.support import examples
from tests.support.recordings import DEMO, Matching, changed

from dynamix.cli.main import main
from dynamix.recording.capture import CaptureWriter, Record, read_header, records
from dynamix.schemas import codec
from dynamix.schemas.codec import decode
from dynamix.schemas.messages import Action
from dynamix.schemas.streams import ACTIONS


def played(path: Path, *arguments: str) -> int:
    return main(["replay", str(path), *arguments])


@pytest.mark.parametrize("into", ["collector", "reward", "arbitrator"])
def test_equal_is_zero(into: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert played(DEMO, "--into", into) == 0
    assert "EQUAL: of" in capsys.readouterr().out


def test_what_cannot_all_be_compared_is_one_and_not_called_equal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    middle = next(record.sequence for record in records(DEMO) if Matching("state", 10)(record))
    later = changed(
        DEMO, tmp_path / "later.dxc", lambda one: one if one.stream != "FEED" or one.sequence >= middle else None
    )
    assert played(later) == 1
    output = capsys.readouterr().out
    assert "INCOMPLETE: of 19" in output
    assert "11 recorded actions were not compared" in output


def test_different_is_one_and_shows_both_sides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def with_other_sizes(record: Record) -> Record:
        if not Matching("action", 5)(record):
            return record
        action = decode(Action, record.subject, record.payload)
        other = examples.with_levers(action, local_batch_sizes=(*action.local_batch_sizes[:-1], 54))
        return record._replace(payload=codec.encode(other))

    other, target = changed(DEMO, tmp_path / "other.dxc", with_other_sizes), tmp_path / "out.json"
    assert played(other, "--json", str(target)) == 1
    output = capsys.readouterr().out
    assert "DIFFERENT: of 30 actions 29 are equal byte for byte" in output
    assert "first difference: action for window 5 of generation 0" in output
    row = next(line for line in output.splitlines() if "allocation.local_batch_sizes[3]" in line)
    assert row.split() == ["allocation.local_batch_sizes[3]", "54", "53"]
    document = json.loads(target.read_text())
    assert (document["equal"], document["bytes_equal"], document["decisions_equal"]) == (False, False, False)
    assert document["counts"]["differences"][0]["window"] == 5


def test_equal_decisions_are_enough_for_another_processor_unless_bytes_are_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    assert played(path, "--strict") == 1


def test_what_cannot_be_read_is_two_and_says_how_far_it_is_good(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert played(tmp_path / "nothing.dxc") == 2
    data = bytearray(DEMO.read_bytes())
    data[-100] ^= 1
    damaged = tmp_path / "damaged.dxc"
    damaged.write_bytes(data)
    assert played(damaged) == 2
    assert "records before it are good" in capsys.readouterr().err
