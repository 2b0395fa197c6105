"""backup-store.sh and restore-store.sh: the store moves under a running job, and an old copy is detected."""

import shutil
import subprocess
import time
from pathlib import Path

import pytest
from bench.jobs import running_job
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


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store that no broker has open."""
    path = tmp_path / "store"
    (path / "jetstream" / "DYNAMIX" / "streams").mkdir(parents=True)
    (path / "jetstream" / "DYNAMIX" / "streams" / "1.blk").write_bytes(b"block")
    return path


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
        await until(lambda: all(service.exit_code() == 1 for service in plane.services.values()), 60)
        await plane.start(*SERVICES)
        await feed_windows(plane, job, range(30, 45))
        actions = await plane.wait_for_actions(45, job.job)
        assert [action.window for action in actions] == list(range(45))
        check_chain(actions)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_three_restored_stores_are_one_cluster_again_and_an_empty_one_is_filled(tmp_path: Path) -> None:
    async with ThreeServers() as servers, connected(servers.settings) as bus:
        await provision(bus, num_replicas=NUM_SERVERS)
        await servers.until_current(bus)
        async with running_job(servers.settings, bus) as job:
            bystander = Bystander(bus, 1)
            empty = servers.servers["broker-2"]
            await empty.stop()
            shutil.rmtree(store_of(empty))
            await empty.start()
            await servers.until_current(bus)
            await job.until_decided(len(job.reported_at), 60)
            async with job.paused(60):
                assert await bystander.num_lost() == 0
                for server in servers.servers.values():
                    await server.stop()
                    file = backed_up(store_of(server), tmp_path / f"{server.name}.tar.gz")
                    shutil.rmtree(store_of(server))
                    server._store_dir = restored(file, tmp_path / server.name)
                for server in servers.servers.values():
                    await server.start()
                await servers.until_current(bus)
                assert await bystander.num_lost() == 0
            await job.until_decided(len(job.reported_at) + 5, 60)
            assert job.num_out_of_chain() == 0


def test_what_was_written_comes_back_and_a_second_copy_replaces_nothing(store: Path, tmp_path: Path) -> None:
    file = backed_up(store, tmp_path / "store.tar.gz")
    assert file.stat().st_mode & 0o777 == 0o600
    moved = restored(file, tmp_path / "moved")
    assert (moved / "jetstream" / "DYNAMIX" / "streams" / "1.blk").read_bytes() == b"block"
    assert [path.name for path in moved.iterdir()] == ["jetstream"]
    again, twice = run("backup-store.sh", store, file), run("restore-store.sh", file, moved)
    assert (again.returncode, twice.returncode) == (2, 2)
    assert "exists: choose another name" in again.stderr
    assert "has streams already" in twice.stderr


def test_a_damaged_file_is_refused_and_nothing_is_written(store: Path, tmp_path: Path) -> None:
    file = backed_up(store, tmp_path / "store.tar.gz")
    damaged = bytearray(file.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    file.write_bytes(damaged)
    done = run("restore-store.sh", file, tmp_path / "moved")
    assert done.returncode == 2
    assert "is not as it was written" in done.stderr
    assert not (tmp_path / "moved").exists()


async def test_the_store_of_a_running_broker_is_refused(tmp_path: Path) -> None:
    async with EmbeddedServer(store_dir=tmp_path / "store") as server, connected(server.settings) as bus:
        await provision(bus)
        backup = run("backup-store.sh", tmp_path / "store", tmp_path / "store.tar.gz")
    assert backup.returncode == 2
    assert "stop the broker first" in backup.stderr
    assert not (tmp_path / "store.tar.gz").exists()


def test_a_store_that_changes_while_it_is_copied_is_refused(store: Path, tmp_path: Path) -> None:
    """A broker that has no file open at the moment may still write."""
    tools = tmp_path / "tools"
    tools.mkdir()
    tar = tools / "tar"
    tar.write_text(f'#!/bin/sh\nsleep 0.05\ntouch {store}/jetstream/written\nexec {shutil.which("tar")} "$@"\n')
    tar.chmod(0o755)
    time.sleep(0.05)
    command = ["sh", str(DEPLOY / "backup-store.sh"), str(store), str(tmp_path / "store.tar.gz")]
    done = subprocess.run(command, env={"PATH": f"{tools}:/usr/bin:/bin"}, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "the store changed meanwhile" in done.stderr
    assert not list(tmp_path.glob("store.tar.gz*"))


@pytest.mark.parametrize("wrong", ["empty", "missing"])
def test_what_is_no_store_is_refused(tmp_path: Path, wrong: str) -> None:
    (tmp_path / "empty").mkdir()
    done = run("backup-store.sh", tmp_path / wrong, tmp_path / "store.tar.gz")
    assert done.returncode == 2
    assert "is no store of nats-server" in done.stderr
