"""What the services log: every line says which service it is of, and what it concerns."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.brokers import until
from tests.support.control_plane import NODE, control_plane, one_node_job, report_of

from dynamix.cli.services import SERVICES
from dynamix.schemas import subjects

pytestmark = pytest.mark.timeout(300)

Line = dict[str, Any]


async def test_a_line_names_its_service_and_its_job_window_or_message(tmp_path: Path) -> None:
    def lines(service: str) -> list[Line]:
        whole = (tmp_path / service).read_text().rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]

    async def first(service: str, holds: Callable[[Line], bool]) -> Line:
        """Wait for a line."""
        await until(lambda: any(map(holds, lines(service))))
        return next(filter(holds, lines(service)))

    job, unknown = one_node_job(), one_node_job(job="other-0a1b2c3d", generation=2, policy="no-such")
    async with control_plane() as plane:
        for service in SERVICES:
            with (tmp_path / service).open("wb") as output:
                await plane.start(service, output=output)

        await plane.bus.publish(unknown)
        await plane.bus.publish(report_of(unknown, 0, (128,) * 4, (100.0,) * 4))
        halted = await first("arbitrator", lambda line: line["event"] == "no decisions for this job")
        assert (halted["job"], halted["generation"]) == ("other-0a1b2c3d", 2)

        await plane.bus.publish(job)
        report = report_of(job, 7, (128,) * 4, (100.0,) * 4)
        foreign = tuple(msgspec.structs.replace(row, pid_start_ticks=1) for row in report.rows)
        await plane.bus.publish(msgspec.structs.replace(report, rows=foreign))
        refused = await first("collector", lambda line: line["event"] == "a reported process is not read")
        assert (refused["job"], refused["generation"], refused["window"]) == (job.job, 0, 7)

        subject = subjects.of("window", "junk", NODE)
        sequence = await plane.bus.publish_bytes(subject, b"no message", "junk")
        dead = await first("reward", lambda line: line["event"].startswith("dead letter"))
        assert (dead["subject"], dead["sequence"], dead["job"]) == (subject, sequence, "junk")

        for service in SERVICES:
            for line in lines(service):
                assert (line.get("service"), line.get("instance")) == (service, NODE), line
                assert {"event", "level", "logger", "timestamp"} <= set(line), line
