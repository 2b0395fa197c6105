"""Real ranks under a collector with its eBPF probe: which probe each window names, and what it says."""

import asyncio
from pathlib import Path

import pytest
from tests.support.control_plane import NODE, ControlPlane, control_plane
from tests.support.steady_training import JOB, training

from dynamix.schemas import subjects
from dynamix.schemas.messages import MetricWindow, Report
from dynamix.schemas.streams import FEED, REPORTS

pytestmark = [pytest.mark.bpf, pytest.mark.slow, pytest.mark.timeout(900)]


async def test_windows_use_the_kernel_probe_unless_the_collector_starts_after_the_job(tmp_path: Path) -> None:
    async with control_plane() as plane:
        plane.environ["DYNAMIX_COLLECTOR_PROBE"] = "auto"
        await plane.start("collector")
        async with training(plane, tmp_path, num_epochs=100) as job:  # outlives a slow start of the second one
            await plane.wait_for(FEED.name, subjects.of("window", JOB, NODE), 4)
            plane.services["collector"].kill()
            before = await windows_of(plane)
            await plane.start("collector")
            await job.more_steps(1)
            after: list[MetricWindow] = []
            async with asyncio.timeout(60):  # reports from before its start come late, those that follow do not
                while not after or "came late" in after[-1].probe_note:
                    await asyncio.sleep(0.1)
                    after = (await windows_of(plane))[len(before) :]
        stored: list[Report] = await plane.messages(REPORTS.name, subjects.of("report", JOB, NODE))  # type: ignore[assignment]
        reports = {report.window: report for report in stored}

    first, *rest = before
    assert (first.probe, first.probe_note) == ("tcp_info", "ebpf: nothing was read before a job's first window")
    assert {window.probe for window in rest} == {"ebpf"}
    counted = told = 0
    for window in rest:
        for row, rank in zip(reports[window.window].rows, window.ranks, strict=True):
            assert rank.network is not None
            assert len(row.cookies) > 0
            assert row.sockets is not None
            assert row.sockets_before is not None
            counted += rank.network.tx_bytes
            told += row.sockets.tx_bytes - row.sockets_before.tx_bytes
            assert rank.network.srtt_us is not None
            assert rank.system.context_switches_per_s is not None
            assert rank.system.context_switches_per_s > 0
    assert counted == pytest.approx(told, rel=0.25), "as the ranks themselves saw it, but for when it was read"
    assert {window.probe for window in after} == {"tcp_info"}
    assert "the probe does not know" in after[-1].probe_note


async def windows_of(plane: ControlPlane) -> list[MetricWindow]:
    return await plane.messages(FEED.name, subjects.of("window", JOB, NODE))  # type: ignore[return-value]
