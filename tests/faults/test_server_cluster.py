"""A broker of three servers that loses one: nothing acknowledged is lost, and decisions come back."""

import pytest
from bench.failover.servers import NUM_SERVERS, ThreeServers
from bench.failover.trial import Fault, Scene, run_trial
from bench.harness.steady_job import running_job
from tests.support.brokers import connected
from tests.support.decision_checks import check_chain
from tests.support.faults import Figure, Scale

from dynamix.runtime.bus.provision import provision
from dynamix.schemas.streams import ACTIONS, FEED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("fault", ["leader-kill", "leader-freeze", "rolling-restart"])
async def test_a_cluster_that_loses_a_server_loses_no_message(fault: Fault, scale: Scale, figure: Figure) -> None:
    """Every window is decided once and in order, those that were reported meanwhile too."""
    num_trials = scale(1, 5)
    async with ThreeServers() as servers, connected(servers.settings) as bus:
        await provision(bus, num_replicas=NUM_SERVERS)
        await servers.until_current(bus)
        async with running_job(servers.settings, bus) as job:
            scene = Scene(servers, bus, job)
            streams = [(FEED, ACTIONS)[number % 2].name for number in range(num_trials)]
            trials = [await run_trial(scene, fault, number, stream) for number, stream in enumerate(streams)]
            assert [trial.lost for trial in trials] == [0] * num_trials
            assert all(trial.acknowledged > trial.num_windows > 0 for trial in trials)
            assert job.num_out_of_chain() == 0
            check_chain(job.actions)
    figure("faults", num_trials)
    figure("acknowledged", sum(trial.acknowledged for trial in trials))
    figure("acknowledged_and_missing", sum(trial.lost for trial in trials))
    figure("longest_without_decisions_s", max(trial.longest_wait_s for trial in trials))
