"""A broker of three servers that loses one: nothing acknowledged is lost, and decisions come back."""

import os

import pytest
from bench.hosts import Hosts
from bench.jobs import running_job
from tests.support.brokers import connected
from tests.support.cut_off import Partition, servers_on
from tests.support.decision_checks import check_chain
from tests.support.faults import Figure, Scale
from tests.support.server_cluster import NUM_SERVERS, Happening, Scene, ThreeServers, Trial, run_trial

from dynamix.runtime.bus.provision import provision
from dynamix.schemas.streams import ACTIONS, FEED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


async def trials_of(
    servers: ThreeServers, fault: str, num_trials: int, happening: Happening | None = None
) -> list[Trial]:
    """Every window is decided once and in order, those that were reported meanwhile too."""
    async with servers, connected(servers.settings) as bus:
        await provision(bus, num_replicas=NUM_SERVERS)
        await servers.until_current(bus)
        async with running_job(servers.settings, bus) as job:
            scene = Scene(servers, bus, job)
            streams = [(FEED, ACTIONS)[number % 2].name for number in range(num_trials)]
            trials = [await run_trial(scene, fault, at, stream, happening) for at, stream in enumerate(streams)]
            assert [trial.lost for trial in trials] == [0] * num_trials
            assert all(trial.acknowledged > trial.num_windows > 0 for trial in trials)
            assert job.num_out_of_chain() == 0
            check_chain(job.actions)
            return trials


def keep(figure: Figure, trials: list[Trial]) -> None:
    figure("faults", len(trials))
    figure("acknowledged", sum(trial.acknowledged for trial in trials))
    figure("acknowledged_and_missing", sum(trial.lost for trial in trials))
    figure("longest_without_decisions_s", max(trial.longest_wait_s for trial in trials))


@pytest.mark.parametrize("fault", ["leader-kill", "leader-freeze", "rolling-restart"])
async def test_a_cluster_that_loses_a_server_loses_no_message(fault: str, scale: Scale, figure: Figure) -> None:
    keep(figure, await trials_of(ThreeServers(), fault, scale(1, 5)))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make hosts, whose links are cut")
async def test_a_server_that_is_cut_off_acknowledges_nothing_and_its_clients_lose_nothing(
    scale: Scale, figure: Figure
) -> None:
    partition = Partition()
    with Hosts(NUM_SERVERS) as hosts, hosts.entered():
        trials = await trials_of(servers_on(hosts), "minority-partition", scale(1, 5), partition)
    keep(figure, trials)
    for seen in partition.views:
        assert (seen.lost, seen.acknowledged_while_cut) == (0, 0)
        assert seen.stored_of_these == seen.sent_while_cut > 0
    figure(
        "stored_of_those_sent_while_cut",
        f"{sum(v.stored_of_these for v in partition.views)}/{sum(v.sent_while_cut for v in partition.views)}",
    )
