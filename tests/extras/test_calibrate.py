"""`dynamix calibrate`, from the bus and from a capture."""

import asyncio
import json
from pathlib import Path

import pytest
from tests.support import capture_files
from tests.support.calibration_job import known_job, known_scenario

from dynamix.cli.main import main
from dynamix.cli.services import bus_environment
from dynamix.extras.calibration import from_bus
from dynamix.lab.simulator.scenario import Scenario
from dynamix.recording import capture
from dynamix.runtime.bus import Bus
from dynamix.runtime.embedded import EmbeddedServer


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The capture of a known job."""
    job = known_job(known_scenario())
    return capture_files.write(tmp_path / "job.dxc", capture_files.records_of([job.job, *job.windows]), job=job.job.job)


def test_a_capture_becomes_a_scenario_a_report_and_a_picture(
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
    assert [worker.saturation for worker in read.workers] == pytest.approx([60, 60, 0, 48], abs=3)
    assert "saturation, samples" in output.err
    assert report["scenario"]["workers"][3]["samples_per_s"] == read.workers[3].samples_per_s
    assert scenario.read_text().startswith("# Fitted to ")
    assert picture.read_bytes().startswith(b"\x89PNG")


async def test_a_job_on_the_bus_is_read_as_it_is_kept(
    server: EmbeddedServer, bus: Bus, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = known_job(known_scenario())
    for message in (job.job, *job.windows[:14]):
        await bus.publish(message)
    assert await from_bus(bus, job.job.job.rpartition("-")[0]) == (job.job, job.windows[:14])
    for variable, value in bus_environment(server.settings).items():
        monkeypatch.setenv(variable, value)
    arguments = ["--workload", "fashion-14-mlp"]
    assert await asyncio.to_thread(main, ["calibrate", job.job.job, *arguments]) == 1
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
