"""backup-store.sh and restore-store.sh: the store moves under a running job, and an old copy is detected."""

import asyncio
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.support.brokers import connected, until
from tests.support.control_plane import ControlPlane, control_plane, feed_windows, one_node_job
from tests.support.decision_checks import check_chain, check_decisions
from tests.support.deployed_broker import DEPLOY
from tests.support.server_cluster import NUM_SERVERS, Bystander, ThreeServers

from dynamix.runtime.bus.provision import provision
from dynamix.runtime.embedded import EmbeddedServer
from dynamix.schemas import subjects
from dynamix.schemas.messages import Job
from dynamix.schemas.streams import FEED

SERVICES = ("collector", "reward", "arbitrator")


def run(script: str, *arguments: Path) -> subprocess.CompletedProcess[str]:
    command = ["sh", str(DEPLOY / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def backed_up(store: Path, file: Path) -> Path:
    done = run("backup-store.sh", store, file)
    assert done.returncode == 0, done.stderr
    return file


def restored(file: Path, store: Path) -> Path:
    done = run("restore-store.sh", file, store)
    assert done.returncode == 0, done.stderr
    return store


def store_of(server: EmbeddedServer) -> Path:
    return server._store_dir or server._directory / "store"


async def begun_job(plane: ControlPlane, num_reports: int) -> Job:
    """A job with so many reports, the first ten of which are decided at least."""
    job = one_node_job()
    await plane.bus.publish(job)
    await feed_windows(plane, job, range(num_reports))
    await plane.wait_for_actions(10, job.job)
    return job


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_moved_store_loses_nothing_and_every_window_is_decided_once(tmp_path: Path) -> None:
    """The broker of another directory takes over the address; reports go in all the time."""
    async with control_plane(*SERVICES) as plane:
        job = await begun_job(plane, num_reports=20)
        await plane.server.stop()
        file = backed_up(store_of(plane.server), tmp_path / "store.tar.gz")
        shutil.rmtree(store_of(plane.server))
        plane.server._store_dir = restored(file, tmp_path / "moved")
        await feed_windows(plane, job, range(20, 30))
        await plane.server.start()
        await feed_windows(plane, job, range(30, 50))
        await plane.wait_for_actions(50, job.job)
        assert all(service.exit_code() is None for service in plane.services.values())
        await check_decisions(plane.bus, job, num_windows=50)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_services_that_read_further_than_an_old_copy_end_and_go_on_after_a_restart(tmp_path: Path) -> None:
    """What was decided after the copy is decided again, without measurements; a trainer refuses what is not newer."""
    async with control_plane(*SERVICES) as plane:
        job = await begun_job(plane, num_reports=10)
        await plane.server.stop()
        file = backed_up(store_of(plane.server), tmp_path / "store.tar.gz")
        await plane.server.start()
        await feed_windows(plane, job, range(10, 30))
        await plane.wait_for_actions(30, job.job)
        await plane.wait_for(FEED.name, subjects.of("reward", job.job, "*"), 30)  # no decision waits for a reward
        await plane.server.stop()
        plane.server._store_dir = restored(file, tmp_path / "old")
        await plane.server.start()
        await until(lambda: all(service.exit_code() == 1 for service in plane.services.values()))
        await plane.start(*SERVICES)
        await feed_windows(plane, job, range(30, 45))
        actions = await plane.wait_for_actions(45, job.job)
        assert [action.window for action in actions] == list(range(45))
        check_chain(actions)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_three_restored_stores_are_one_cluster_again(tmp_path: Path) -> None:
    async with ThreeServers() as servers, connected(servers.settings) as bus:
        await provision(bus, num_replicas=NUM_SERVERS)
        await servers.until_current(bus)
        bystander = Bystander(bus, 1)
        await asyncio.sleep(1.0)  # some messages
        assert await bystander.num_lost() == 0
        for server in servers.servers.values():
            await server.stop()
            file = backed_up(store_of(server), tmp_path / f"{server.name}.tar.gz")
            shutil.rmtree(store_of(server))
            server._store_dir = restored(file, tmp_path / server.name)
        for server in servers.servers.values():
            await server.start()
        await servers.until_current(bus)
        assert bystander.num_acknowledged > 0
        assert await bystander.num_lost() == 0


def test_a_restored_store_equals_the_copied_one_and_wrong_arguments_change_nothing(tmp_path: Path) -> None:
    store, block = tmp_path / "store", "jetstream/DYNAMIX/streams/1.blk"
    (store / block).parent.mkdir(parents=True)
    (store / block).write_bytes(b"block")
    file = backed_up(store, tmp_path / "store.tar.gz")
    assert file.stat().st_mode & 0o777 == 0o600
    moved = restored(file, tmp_path / "moved")
    assert (moved / block).read_bytes() == b"block"

    (tmp_path / "empty").mkdir()
    damaged = tmp_path / "damaged.tar.gz"
    backed_up(store, damaged)
    whole = bytearray(damaged.read_bytes())
    whole[len(whole) // 2] ^= 1
    damaged.write_bytes(whole)
    for script, source, target, sentence in (
        ("backup-store.sh", store, file, "exists: choose another name"),
        ("backup-store.sh", tmp_path / "empty", tmp_path / "x.tar.gz", "is no store of nats-server"),
        ("restore-store.sh", file, moved, "has streams already"),
        ("restore-store.sh", damaged, tmp_path / "other", "is not as it was written"),
    ):
        refused = run(script, source, target)
        assert refused.returncode == 2
        assert sentence in refused.stderr
    assert not (tmp_path / "x.tar.gz").exists()
    assert not (tmp_path / "other").exists()


async def test_the_store_of_a_running_broker_is_refused(tmp_path: Path) -> None:
    async with EmbeddedServer(store_dir=tmp_path / "store") as server, connected(server.settings) as bus:
        await provision(bus)
        backup = run("backup-store.sh", tmp_path / "store", tmp_path / "store.tar.gz")
    assert backup.returncode == 2
    assert "stop the broker first" in backup.stderr
    assert not (tmp_path / "store.tar.gz").exists()
