"""How long it takes from a clone to a secured deployment: `python -m bench.by_hand [--runs N] [--json FILE]`.

It types what deploy/README.md says, as its blocks stand there: certificates (for this machine's address), broker and
services over TLS by hand, then keys for one node and one job, and the end of the shared passwords. Its changes of /etc,
/opt and /var are made in an overlay of its own, which is gone with it; the broker listens on this machine's port 4222.
At last a job with its key must be decided for, and be refused what is another job's. As root; a minute or two a run,
most of it pip's.
"""

import asyncio
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import msgspec
from bench.harness.broker import run_with_uvloop
from bench.harness.command import BenchmarkError, BenchmarkReport, benchmark_parser, run_benchmark
from bench.harness.steady_job import NODE, SteadyJob

from dynamix.runtime.bus import Bus, PermissionDeniedError
from dynamix.runtime.settings import BusSettings

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "deploy/README.md"
ADDRESS, PORT, JOB, ANOTHERS_JOB = "127.0.0.1", 4222, "alice-1", "bob-1"
READY = "ready"
NAMESPACES = ("unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--mount-proc")
"""When the shell ends, everything that it started does."""
CHANGED = ("etc", "opt", "var")
OVERLAYS = """mount -t tmpfs none /mnt
for name in {names}; do
    mkdir -p /mnt/$name/upper /mnt/$name/work
    mount -t overlay none /$name -o lowerdir=/$name,upperdir=/mnt/$name/upper,workdir=/mnt/$name/work
done"""
MADE = ("/etc/dynamix", "/opt/dynamix", "/var/lib/dynamix-nats")


class Step(msgspec.Struct, frozen=True):
    """A part of the document, and how long its commands took."""

    name: str
    seconds: float


def blocks(text: str, heading: str) -> list[str]:
    """The indented blocks of a section, in order, without their indentation."""
    _, found, rest = text.partition(f"\n## {heading}\n")
    if not found:
        raise BenchmarkError(f"deploy/README.md has no section {heading!r}")
    section = rest.partition("\n## ")[0]
    return [
        re.sub("^    ", "", part, flags=re.MULTILINE) for part in re.findall(r"(?<=\n\n)(?:(?:    .*)?\n)+", section)
    ]


def adapted(block: str, **changes: str) -> str:
    """A block with what the document says to put in the place of its names."""
    for old, new in changes.items():
        block = new.join(_parted(block, old)[::2])
    return block


def steps(text: str) -> Iterator[tuple[str, str]]:
    """The parts of a deployment by the document, with their commands."""
    certificates, by_hand, keys = (blocks(text, name)[0] for name in ("Certificates", "By hand", "Keys"))
    yield "clone", f"git clone -q {ROOT} clone && cd clone"
    made = adapted(certificates, **{"DNS:$name": f"IP:{ADDRESS}"})
    yield (
        "certificates",
        f"""(mkdir ../made && cd ../made
{made}
install -D -m 644 broker.example.pem /etc/dynamix/tls/certificate.pem
install -D -m 600 broker.example.key /etc/dynamix/tls/key.pem
install -D -m 644 ca.pem /etc/dynamix/ca.pem)""",
    )
    pip, path, rest = _parted(adapted(by_hand, **{"broker.example": ADDRESS}), "export PATH")
    yield "environment, by pip", pip
    broker, url, rest = _parted(rest, "export DYNAMIX_NATS_URL")
    yield "broker", path + broker
    services, watcher, doctor = _parted(rest, "as watcher ")
    yield "streams and services", f"export DYNAMIX_NODE={NODE}\n{url}{services}"
    looked = f"until {watcher}{doctor.strip()} >doctor.txt 2>&1; do sleep 0.5; done"
    yield "dynamix doctor finds nothing missing", looked
    made = adapted(keys, **{"--node NODE": f"--node {NODE}", "systemctl reload dynamix-nats": "kill -HUP $broker"})
    yield "keys for a job and a node", f"broker=$(pgrep -x -P $$ nats-server)\n{made}"
    yield (
        "the collector with its key, shared passwords ended",
        f"""
kill $(pgrep -P $$ -f dynamix.collector)
DYNAMIX_NATS_CREDS_FILE=$PWD/node-a.creds python -m dynamix.collector &
dynamix keys revoke trainer
dynamix keys revoke collector
kill -HUP $broker
{looked}""",
    )


def _parted(block: str, by: str) -> tuple[str, str, str]:
    if by not in block:
        raise BenchmarkError(f"deploy/README.md has no {by!r} any more, in the block that begins {block[:40]!r}")
    return block.partition(by)


def script(text: str) -> str:
    """All steps for one shell, which says when each has ended, and ends what it started once its input does."""
    parts = [f"{commands}\necho '@ {name}' >&3" for name, commands in steps(text)]
    begin = ["exec 3>&1 >log.txt 2>&1", "trap 'kill $(jobs -p); wait' EXIT", OVERLAYS.format(names=" ".join(CHANGED))]
    return "\n".join([*begin, "echo '@ ' >&3", *parts, f"echo '@ {READY}' >&3", "read -r _ || true"])


def deploy(directory: Path) -> list[Step]:
    """Type the document, and have a job decided for."""
    found: list[Step] = []
    with subprocess.Popen(
        [*NAMESPACES, "bash", "-ec", script(DOCUMENT.read_text())],
        cwd=directory,
        env={"PATH": os.environ["PATH"], "HOME": str(directory), **_of_pip()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as shell:
        assert shell.stdout is not None
        assert shell.stdin is not None
        began = time.monotonic()
        for line in shell.stdout:
            name, now = line[2:].strip(), time.monotonic()
            if name == READY:
                break
            if name:
                found.append(Step(name, now - began))
                print(f"{name}: {found[-1].seconds:.1f} s", file=sys.stderr)
            began = now
        else:
            shell.wait(timeout=60)
            raise BenchmarkError(f"it ended after {[one.name for one in found]}: {_log(directory)}")
        try:
            began = time.monotonic()
            run_with_uvloop(_check(directory / "clone" / "alice.creds", Path(f"/proc/{shell.pid}/root/etc/dynamix")))
            found.append(Step("a job with its key: first decision", time.monotonic() - began))
        finally:
            shell.stdin.close()
            shell.wait(timeout=60)
    return found


def _of_pip() -> dict[str, str]:
    """Where pip finds its packages: settings of this machine."""
    return {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "UV_"))}


def _log(directory: Path) -> str:
    return "; ".join((directory / "log.txt").read_text().splitlines()[-5:])


async def _check(key: Path, etc: Path) -> None:
    """The key's job is decided for; another job may not be spoken for."""
    settings = BusSettings(url=f"tls://{ADDRESS}:{PORT}", ca_file=str(etc / "ca.pem"), creds_file=str(key))
    password = etc / "credentials/watcher.password"
    looking = msgspec.structs.replace(settings, creds_file="", user="watcher", password_file=str(password))
    async with asyncio.timeout(60):
        trainer, watcher = [await Bus.connect(one, name=f"trainer-{NODE}") for one in (settings, looking)]
        try:
            async with SteadyJob(trainer, reader=watcher, name=JOB).running():
                pass
            try:
                await trainer.publish(SteadyJob(trainer, name=ANOTHERS_JOB).job)
            except PermissionDeniedError:
                return
            raise BenchmarkError(f"a key for {JOB} may speak for {ANOTHERS_JOB}")
        finally:
            await trainer.close()
            await watcher.close()


def measure(num_runs: int) -> BenchmarkReport:
    """Deploy so often, each time on a machine that has nothing of it."""
    if os.geteuid() != 0:
        raise BenchmarkError("run it as root: it mounts")
    if found := [path for path in MADE if Path(path).exists()]:
        raise BenchmarkError(f"a deployment is on this machine already ({', '.join(found)}): use another")
    with socket.socket() as probe:
        if probe.connect_ex((ADDRESS, PORT)) == 0:
            raise BenchmarkError(f"a broker listens on port {PORT} of this machine: stop it first")
    runs = []
    for _ in range(num_runs):
        with tempfile.TemporaryDirectory(prefix="dynamix-by-hand-") as name:
            runs.append(deploy(Path(name)))
    lines = []
    for same in zip(*runs, strict=True):
        times = sorted(step.seconds for step in same)
        lines.append(f"{same[0].name:<55} {median(times):6.1f} s   {times[0]:.1f} to {times[-1]:.1f}")
    totals = sorted(sum(step.seconds for step in run) for run in runs)
    lines.append(f"{'all':<55} {median(totals):6.1f} s   {totals[0]:.1f} to {totals[-1]:.1f}")
    return BenchmarkReport({"runs": runs}, "\n".join(lines))


def main() -> int:
    """Entry point."""
    parser = benchmark_parser("by_hand", __doc__, ("--runs", 3, "deployments"))
    options = parser.parse_args()
    return run_benchmark("by_hand", options, lambda: measure(options.runs))


if __name__ == "__main__":
    sys.exit(main())
