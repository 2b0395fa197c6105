"""The embedded broker: where it listens, what it hides, how it ends."""

import asyncio
import signal
import stat
import sys
from pathlib import Path

import pytest
from tests.support.brokers import ConfiguredServer, connected, publish_states

from dynamix.cli.commands.up import exited
from dynamix.runtime.bus import Bus
from dynamix.runtime.bus.provision import provision
from dynamix.runtime.embedded import EmbeddedServer, EmbeddedServerError

PARENT = """
import asyncio, sys
from dynamix.runtime.embedded import EmbeddedServer

async def main():
    async with EmbeddedServer() as server:
        print(server.pid, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def proc(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text()


async def test_it_listens_on_loopback_only(server: ConfiguredServer) -> None:
    listening = [line.split() for line in proc(server.pid, "net/tcp").splitlines()[1:]]
    port = f"{server.port:04X}"
    addresses = {fields[1] for fields in listening if fields[3] == "0A" and fields[1].endswith(port)}
    assert addresses == {f"0100007F:{port}"}


async def test_its_password_is_neither_in_arguments_nor_in_logs_nor_readable_for_others(
    server: ConfiguredServer, bus: Bus
) -> None:
    await publish_states(bus, range(3))
    password = server.settings.password
    assert len(password) >= 32
    assert password not in proc(server.pid, "cmdline")
    assert password not in proc(server.pid, "environ")
    assert password not in repr(server.settings)
    directory = server.log_file.parent
    holders = [path for path in directory.rglob("*") if path.is_file() and password.encode() in path.read_bytes()]
    assert [path.name for path in holders] == ["nats.conf"]
    assert stat.S_IMODE(holders[0].stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


async def test_a_given_directory_keeps_the_streams_and_a_made_up_one_is_removed(tmp_path: Path) -> None:
    store = tmp_path / "store"
    for expected in (["JOBS: created"], ["JOBS: unchanged"]):
        async with EmbeddedServer(store_dir=store) as server, connected(server.settings) as bus:
            assert (await provision(bus))[:1] == expected
            directory = server.log_file.parent
        assert not directory.exists()
    assert store.exists()


async def test_it_dies_with_a_parent_that_is_killed() -> None:
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", PARENT, stdout=asyncio.subprocess.PIPE)
    pid = int(await parent.stdout.readline())
    ending = asyncio.create_task(exited(pid))
    parent.send_signal(signal.SIGKILL)
    await parent.communicate()
    await asyncio.wait_for(ending, 60)


async def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(EmbeddedServerError, match="unknown field"):
        async with ConfiguredServer(extra="nonsense: 1"):
            pass
    occupied = EmbeddedServer(store_dir=tmp_path / "a")
    async with occupied:
        reason = (
            rf'^nats-server ended at once: Error listening on port: \S+:{occupied.port}, .*address already in use"$'
        )
        with pytest.raises(EmbeddedServerError, match=reason):
            async with EmbeddedServer(store_dir=tmp_path / "b", port=occupied.port):
                pass
