"""Sizes of the images, and whether they run: `python -m bench.image [--targets A,B] [--work DIR] [--json FILE]`.

Carries out deploy/Dockerfile in directories (no Docker is needed; root, debootstrap and Debian's archive are), then
starts each service of them as its container would be, against a real broker: without root, without a capability,
without a place to write. A minute for the base, one for the environment, both kept in --work.

MB        of all files, in 10^6 bytes, before compression; `own` is without the base
ready     /readyz answers 200
user      the user id that the process has, its effective capabilities, and whether it could write a file
"""

import asyncio
import http.client
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.harness.broker import broker_with_bus, run_with_uvloop
from bench.harness.command import BenchmarkError, BenchmarkReport, Target, benchmark_parser, run_benchmark

from dynamix.cli.services import SERVICES, bus_environment
from dynamix.runtime.settings import BusSettings

from .base import BaseError, make_base
from .container import container_command, container_environment
from .dockerfile import read_stages
from .tree import BuildError, ImageTree, TreeBuilder

ROOT = Path(__file__).parents[2]
MAX_MB = 250.0
FIRST_PORT = 19601
READY_TIMEOUT_S = 120.0
CLOSED = {"ready": True, "uid": 10001, "capabilities": 0, "writes": False}


def measure(targets: list[str], work: Path, lent: list[str]) -> BenchmarkReport:
    """Build all targets, then run those that are services."""
    if os.geteuid() != 0:
        raise BenchmarkError("run it as root: it mounts and changes its root directory")
    base = work / "base"
    make_base(base)
    stages = read_stages((ROOT / "deploy/Dockerfile").read_text())
    with tempfile.TemporaryDirectory(dir=work, prefix="stages-") as directory:
        builder = TreeBuilder(stages, ROOT, base, Path(directory), lent)
        trees = {target: builder.build(target) for target in targets}
        base_mb = builder.build("base").num_bytes / 1e6
        sizes = {target: tree.num_bytes / 1e6 for target, tree in trees.items()}
        ran = run_with_uvloop(_run_services({name: tree for name, tree in trees.items() if name in SERVICES}))
    images: dict[str, dict[str, Any]] = {name: {"mb": mb, **ran.get(name, {})} for name, mb in sizes.items()}
    return BenchmarkReport(
        {"base_mb": base_mb, "images": images},
        _table(base_mb, images),
        [Target(name=f"{name}: MB", value=mb, at_most=MAX_MB) for name, mb in sizes.items() if name in SERVICES],
        [f"{name} does not run closed" for name, row in ran.items() if row != CLOSED],
    )


def _table(base_mb: float, images: dict[str, dict[str, Any]]) -> str:
    lines = [f"{'base with Python':<16} {base_mb:6.0f} MB"]
    for name, row in images.items():
        ran = ", ".join(f"{key} {value}" for key, value in row.items() if key != "mb") or "not run"
        lines.append(f"{name:<16} {row['mb']:6.0f} MB, own {row['mb'] - base_mb:4.0f} MB; {ran}")
    return "\n".join(lines)


async def _run_services(trees: dict[str, ImageTree]) -> dict[str, dict[str, Any]]:
    async with broker_with_bus("image") as (server, _):
        return {
            name: await asyncio.to_thread(_run, name, tree, server.settings, FIRST_PORT + number)
            for number, (name, tree) in enumerate(trees.items())
        }


def _run(name: str, tree: ImageTree, bus: BusSettings, port: int) -> dict[str, Any]:
    """Start a service, wait until it is ready, look at its process, stop it."""
    settings = {**bus_environment(bus), "DYNAMIX_METRICS_PORT": str(port), "DYNAMIX_NODE": "image"}
    environ = container_environment(tree, settings)
    writes = subprocess.run(
        container_command(tree, "sh", "-c", "touch /tmp/x || touch /opt/x || touch /x"),
        env=environ,
        capture_output=True,
        check=False,
    )
    with subprocess.Popen(container_command(tree), env=environ, stderr=subprocess.PIPE, text=True) as process:
        try:
            ready = _wait_until_ready(process, port)
            status = Path(f"/proc/{process.pid}/status").read_text() if ready else ""
        finally:
            process.terminate()
            _, stderr = process.communicate(timeout=30)
    if not ready:
        raise BenchmarkError(f"{name} is not ready after {READY_TIMEOUT_S:g} s: {stderr[-2000:]}")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    return {
        "ready": ready,
        "uid": int(fields["Uid"].split()[1]),
        "capabilities": int(fields["CapEff"], 16),
        "writes": writes.returncode == 0,
    }


def _wait_until_ready(process: subprocess.Popen[str], port: int) -> bool:
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline_s and process.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/readyz")
            if connection.getresponse().status == http.HTTPStatus.OK:
                return True
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(0.2)
    return False


def main() -> int:
    """Entry point."""
    parser = benchmark_parser(
        "image",
        __doc__,
        ("--targets", ",".join((*SERVICES, "cli")), "what to build; services are run as well"),
        ("--work", "out/image", "where base and stages are made: some GB"),
        ("--lend", "", "directories of packages that pip may read, with commas between them"),
    )
    options = parser.parse_args()
    work = Path(options.work).resolve()
    work.mkdir(parents=True, exist_ok=True)
    lent = [path for path in options.lend.split(",") if path]
    return run_benchmark(
        "image",
        options,
        lambda: measure(options.targets.split(","), work, lent),
        cannot=(BaseError, BuildError, ValueError),
    )


if __name__ == "__main__":
    sys.exit(main())
