"""`dynamix calibrate`, from the bus and from a recording."""

import asyncio
import json
import struct
from pathlib import Path

import msgspec
import pytest
from tests.support.calibrated import known_job, known_scenario

from dynamix.cli.calibrate import recording
from dynamix.cli.calibrate.recording import Record
from dynamix.cli.errors import CommandError
from dynamix.cli.main import main
from dynamix.runtime.bus import Bus
from dynamix.runtime.embedded import EmbeddedServer
from dynamix.schemas.codec import encode
from dynamix.schemas.messages import Message
from dynamix.schemas.table import subject_of
from dynamix.trainer.virtual.scenario import Scenario


def record(message: Message) -> Record:
    return Record(subject_of(message), encode(message))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The recording of a known job."""
    job = known_job(known_scenario())
    recording.write(tmp_path / "job.dxr", [record(job.job), *map(record, job.windows)])
    return tmp_path / "job.dxr"


def test_a_recording_becomes_a_scenario_a_report_and_a_picture(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario, picture = tmp_path / "mine.toml", tmp_path / "mine.png"
    arguments = ["--workload", "fashion-14-mlp", "--target", "0.7", "-o", str(scenario), "--png", str(picture)]
    assert main(["calibrate", str(file), *arguments, "--json", "-"]) == 0
    output = capsys.readouterr()
    report = json.loads(output.out)  # nothing else on standard output
    assert "± " in output.err
    assert report["median_error"] < 0.02
    assert len(report["comparisons"]) == report["num_windows"]
    read = Scenario.read(scenario)
    assert read.name == "mine"
    assert read.target_accuracy == 0.7
    assert [worker.samples_per_s for worker in read.workers] == pytest.approx([4000, 4000, 2000, 1000], rel=0.04)
    assert report["scenario"]["workers"][3]["samples_per_s"] == read.workers[3].samples_per_s
    assert scenario.read_text().startswith("# Fitted to ")
    assert picture.read_bytes().startswith(b"\x89PNG")


async def test_a_job_on_the_bus_is_recorded_as_it_is_kept(
    server: EmbeddedServer,
    bus: Bus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = known_job(known_scenario())
    sent = [job.job, *job.windows[:30]]
    for message in sent:
        await bus.publish(message)
    for variable, value in (("URL", server.settings.url), ("USER", server.settings.user)):
        monkeypatch.setenv(f"DYNAMIX_NATS_{variable}", value)
    monkeypatch.setenv("DYNAMIX_NATS_PASSWORD", server.settings.password)
    file = tmp_path / "job.dxr"
    assert await asyncio.to_thread(main, ["calibrate", job.job.job, "--save", str(file)]) == 0
    assert recording.read(file) == [record(message) for message in sent]
    assert "30 windows saved" in capsys.readouterr().out
    assert await asyncio.to_thread(main, ["calibrate", "nobody", "--save", str(file)]) == 1
    assert f"no job and no file is called 'nobody'; jobs on this broker: {job.job.job}" in capsys.readouterr().err


async def test_a_job_without_windows_needs_a_collector(
    server: EmbeddedServer, bus: Bus, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = known_job(known_scenario()).job
    await bus.publish(job)
    monkeypatch.setenv("DYNAMIX_NATS_URL", server.settings.url)
    monkeypatch.setenv("DYNAMIX_NATS_USER", server.settings.user)
    monkeypatch.setenv("DYNAMIX_NATS_PASSWORD", server.settings.password)
    name = job.job.rpartition("-")[0]
    assert await asyncio.to_thread(main, ["calibrate", name, "--save", "unused"]) == 1
    assert f"no metric window of {job.job} is kept: a collector must run" in capsys.readouterr().err


def test_damaged_recordings_are_refused(file: Path, tmp_path: Path) -> None:
    content = file.read_bytes()
    damaged = tmp_path / "damaged.dxr"
    for cut in (3, 5, 40, len(content) - 1):
        damaged.write_bytes(content[:cut])
        with pytest.raises(CommandError, match="no recording" if cut == 3 else "ends within a message, at byte"):
            recording.read(damaged)
    damaged.write_bytes(recording.MAGIC + struct.pack("<HI", 1, 1 << 30) + b"x")
    with pytest.raises(CommandError, match="ends within a message, at byte 4"):
        recording.read(damaged)
    with pytest.raises(CommandError, match="cannot read"):
        recording.read(tmp_path / "nowhere")


def test_what_a_recording_must_not_hold_is_said(file: Path) -> None:
    records = recording.read(file)
    subject, payload = records[1]
    with pytest.raises(CommandError, match=r"job.dxr holds what cannot be decoded: .*not a message of ours"):
        recording.understood([Record(subject, b"XX" + payload[2:])], "job.dxr")
    other = msgspec.structs.replace(known_job(known_scenario()).windows[0], job="other-00000001")
    with pytest.raises(CommandError, match="holds windows of several jobs"):
        recording.understood([*records, record(other)], "job.dxr")


def test_what_was_typed_wrongly_is_said(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", str(file)]) == 2
    assert "--workload NAME, or --save FILE" in capsys.readouterr().err
    assert main(["calibrate", str(file), "--workload", "vgg"]) == 1
    assert "workload 'vgg' is not known" in capsys.readouterr().err
    short = tmp_path / "short.dxr"
    recording.write(short, recording.read(file)[:7])
    assert main(["calibrate", str(short), "--workload", "fashion-14-mlp"]) == 1
    assert "2 of 3 windows can be used, 8 are the least" in capsys.readouterr().err
