"""Where joules come from: RAPL's files as the kernel shows them, NVML, and who of several ranks reads them."""

import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.ranks import RankError, run_ranks
from tests.support.training import Numbered, attach_numbered, distribute, make_model, train_step

from dynamix.extras.energy import MOST_WATTS, GpuCounter, PackageCounter
from dynamix.trainer.loggers import Metrics
from dynamix.trainer.measurement.energy import EnergyError, EnergyMeter

RANGE_UJ = 262_143_328_850


class SteppedSeconds:
    """A clock that a test sets."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def zone(folder: Path, name: str, energy_uj: int) -> Path:
    """A counter of RAPL; returns its file."""
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "max_energy_range_uj").write_text(f"{RANGE_UJ}\n")
    (folder / "energy_uj").write_text(f"{energy_uj}\n")
    return folder / "energy_uj"


def two_packages(powercap: Path) -> tuple[Path, Path, Path]:
    """As on a server of two sockets, one of which counts its memory, with all that must not be counted twice."""
    first = zone(powercap / "intel-rapl:0", "package-0", 5_000_000)
    memory = zone(powercap / "intel-rapl:0/intel-rapl:0:1", "dram", 7_000_000)
    second = zone(powercap / "intel-rapl:1", "package-1", 9_000_000)
    for folder, name in (
        ("intel-rapl:0/intel-rapl:0:0", "core"),
        ("intel-rapl:2", "psys"),
        ("intel-rapl-mmio:0", "package-0"),
        ("dtpm", "package-0"),
    ):
        zone(powercap / folder, name, 1)
    (powercap / "intel-rapl:0:1").symlink_to(
        powercap / "intel-rapl:0/intel-rapl:0:1"
    )  # /sys/class has all side by side
    return first, memory, second


def spend(powercap: Path, joules: float) -> None:
    """Let every counter under a folder go on."""
    for file in powercap.rglob("energy_uj"):
        if not file.parent.is_symlink():
            file.write_text(f"{int(file.read_text()) + round(1e6 * joules)}\n")


def test_packages_and_their_memory_are_summed_and_nothing_is_counted_twice(tmp_path: Path) -> None:
    first, memory, second = two_packages(tmp_path)
    counter = PackageCounter(tmp_path)
    assert counter.take_j() == 0.0
    first.write_text("6500000\n")
    memory.write_text("7250000\n")
    second.write_text("13000000\n")
    assert counter.take_j() == pytest.approx(1.5 + 0.25 + 4.0)
    spend(tmp_path, 2.0)
    assert counter.take_j() == pytest.approx(3 * 2.0)


def test_a_counter_that_wraps_goes_on_at_zero(tmp_path: Path) -> None:
    file = zone(tmp_path / "intel-rapl:0", "package-0", RANGE_UJ - 1_000_000)
    counter = PackageCounter(tmp_path)
    file.write_text("3000000\n")
    assert counter.take_j() == pytest.approx(4.0)


def test_a_counter_that_may_have_wrapped_twice_is_unknown_in_that_window_only(tmp_path: Path) -> None:
    zone(tmp_path / "intel-rapl:0", "package-0", 0)
    clock = SteppedSeconds()
    counter = PackageCounter(tmp_path, clock)
    clock.now_s = RANGE_UJ / 1e6 / MOST_WATTS + 1.0
    spend(tmp_path, 5.0)
    with pytest.raises(EnergyError, match=r"energy_uj was not read for 438 s and may have wrapped twice: make windows"):
        counter.take_j()
    clock.now_s += 1.0
    spend(tmp_path, 5.0)
    assert counter.take_j() == pytest.approx(5.0)


class NVMLError(Exception):
    """As pynvml's."""


def fake_nvml(readings_mj: list[int | NVMLError], known: str = "GPU-1") -> Any:
    """A module like pynvml, whose one GPU has these readings."""

    def handle_of(uuid: str) -> str:
        if uuid != known:
            raise NVMLError("Not Found")
        return f"handle of {uuid}"

    def read_mj(handle: str) -> int:
        assert handle == f"handle of {known}"
        reading = readings_mj.pop(0)
        if isinstance(reading, NVMLError):
            raise reading
        return reading

    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=handle_of,
        nvmlDeviceGetTotalEnergyConsumption=read_mj,
    )


def test_a_gpu_counts_millijoules_of_its_own() -> None:
    counter = GpuCounter("GPU-1", fake_nvml([1_000, 3_500, 3_500]))
    assert counter.source == "GPU GPU-1"
    assert [counter.take_j(), counter.take_j()] == [2.5, 0.0]


def test_a_counter_that_fails_later_is_unknown_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    meter = EnergyMeter(GpuCounter("GPU-1", fake_nvml([0, NVMLError("GPU is lost"), 5, NVMLError("GPU is lost")])))
    assert math.isnan(meter.take_j())
    assert meter.take_j() == 0.005
    assert math.isnan(meter.take_j())
    assert caplog.text.count("the energy of a window is unknown") == 1
    assert "GPU is lost" in caplog.text


class Kept:
    """A logger that keeps what it gets."""

    def __init__(self) -> None:
        self.windows: list[tuple[int, Metrics]] = []

    def log(self, metrics: Metrics, *, step: int) -> None:
        self.windows.append((step, metrics))

    def close(self) -> None:
        """Nothing is open."""


def _train(rank: int, powercap: Path | None, objective: str) -> list[float | str | None]:
    """The joules of each window of a run of two nodes on one machine, where each step takes 1.5 J."""
    os.environ["DYNAMIX_NODE"] = f"node-{rank}"
    kept, data = Kept(), Numbered(16 * 8)
    model = distribute(make_model())
    session, optimizer = attach_numbered(
        *(data, model),
        window_steps=2,
        loggers=[kept],
        family="made",
        explores=["learning_rate"],
        objective=objective,
        policy="rule",
    )
    for _ in session.epochs(1):
        for batch in session.loader:
            if powercap is not None and rank == 0:
                spend(powercap, 1.5)
            torch.distributed.barrier()
            train_step(session, model, optimizer, batch)
    session.close()
    return [metrics.get("energy_j") for _, metrics in kept.windows]


def test_a_run_on_two_nodes_of_one_machine_counts_its_joules_once(tmp_path: Path) -> None:
    zone(tmp_path / "intel-rapl:0", "package-0", 0)
    environ = {"DYNAMIX_TRAINER_POWERCAP": str(tmp_path)}
    windows = run_ranks(_train, 2, tmp_path, "energy", environ=environ)[0]
    assert windows == [3.0] * 4
    assert run_ranks(_train, 2, None, "time", environ=environ)[0] == [None] * 4


def test_where_energy_cannot_be_read_nothing_attaches_and_one_sentence_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(RankError) as refused:
        run_ranks(_train, 2, None, "energy", environ={"DYNAMIX_TRAINER_POWERCAP": str(tmp_path)})
    text = str(refused.value)
    assert "objective='energy': rank 0 on node-0 cannot read its energy (2 of 2 ranks cannot): " in text
    assert "Or leave `objective` out, then runs are compared by time" in text
