"""Learning from live jobs with real services; a virtual cluster on the bus decides as one in one process."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from tests.support import virtual
from tests.support.control_plane import ControlPlane, control_plane
from tests.support.lockstep import run_lockstep

from dynamix.arbitrator.learned.policy import JobLevers, LearnedPolicy
from dynamix.arbitrator.learned.policy_file import PolicyFile
from dynamix.arbitrator.learning.ppo import Agent
from dynamix.arbitrator.learning.rollout import Recording, Trajectory, trajectory_of
from dynamix.arbitrator.policies.registry import policy_named
from dynamix.cli.services import wait_until_ready
from dynamix.collector.agent import trace_of
from dynamix.lab.simulator.cluster import VirtualCluster
from dynamix.lab.simulator.episode import Episode, run_episode
from dynamix.lab.simulator.scenario import Scenario, Stragglers
from dynamix.schemas import subjects
from dynamix.schemas.messages import Action, Applied, Job, MetricWindow, PolicyVersion, Report, Reward, State
from dynamix.schemas.streams import FEED, JOBS, POLICIES

POLICY = "mine"
EXPLORE = {"explore": 1.0}
SCENARIO = virtual.scenario(
    target_accuracy=0.6, fixed_time_s=0.0, time_limit_s=2.0, evaluate_every_s=0.05, window_steps=2
)


def name(seed: int) -> str:
    return f"job-{seed}"


async def explore(plane: ControlPlane, seed: int) -> set[int]:
    """Run a job that explores; the versions of the policy that decided it."""
    cluster = VirtualCluster(SCENARIO, virtual.data(), seed=seed, policy=POLICY, policy_options=EXPLORE, job=name(seed))
    return {action.policy_version for action in await run_lockstep(cluster, plane.bus)}


async def start_learner(plane: ControlPlane) -> None:
    """Start it (again), and wait until it listens."""
    plane.services["learner"] = learner = plane.another("arbitrator.learning", {})
    learner.start()
    await wait_until_ready(plane.bus, ["learner"], 180.0)


async def versions(plane: ControlPlane, count: int) -> list[PolicyVersion]:
    """The stored versions, once there are so many."""
    return await plane.wait_for(POLICIES.name, subjects.of("policy", POLICY), count)  # type: ignore[return-value]


def in_one_process(file: PolicyFile, seed: int) -> Trajectory:
    """The same job without a bus."""
    reports: list[Report] = []
    episode = run_episode(
        SCENARIO,
        LearnedPolicy(file),
        data=virtual.data(),
        seed=seed,
        policy_options=EXPLORE,
        job=name(seed),
        on_window=reports.extend,
    )
    _, states, rewards = virtual.messages_of(reports)
    recording = Recording(episode.job, list(enumerate(states, 1)), episode.actions, episode.applied, rewards)
    return trajectory_of(recording, JobLevers(), terminated=True)


@pytest.mark.slow
async def test_a_learner_on_the_bus_gives_the_policies_of_learning_in_one_process() -> None:
    async with control_plane("reward", "arbitrator") as plane:
        plane.environ |= {
            "DYNAMIX_NODE": "virtual-0",
            "DYNAMIX_LEARNER_POLICY": POLICY,
            "DYNAMIX_LEARNER_GENERATIONS_PER_UPDATE": "2",
            "OMP_NUM_THREADS": "1",
        }
        await plane.start("collector")
        await start_learner(plane)
        first = PolicyFile.from_bytes((await versions(plane, 1))[0].content)
        assert await explore(plane, seed=1) == {1}

        plane.services["learner"].kill()  # what it had in hand is on the bus
        await start_learner(plane)
        assert await explore(plane, seed=2) == {1}
        second = PolicyFile.from_bytes((await versions(plane, 2))[1].content)
        assert second.metadata.learned_from == ("job-1:0", "job-2:0")
        assert (second.metadata.num_updates, second.metadata.num_episodes) == (1, 2)
        assert second.metadata.parent == first.digest
        assert (second.metadata.reward_formula, second.metadata.reward_weights) == ("auto", {})

        agent = Agent.of(first)
        agent.learn(await asyncio.to_thread(lambda: [in_one_process(first, seed) for seed in (1, 2)]))
        expected = agent.file().tensors
        assert set(second.tensors) == set(expected)
        assert all((second.tensors[key] == array).all() for key, array in expected.items())
        assert await explore(plane, seed=3) == {2}


# --- a virtual cluster on the bus, and the same in one process ---

NODES = ("virtual-0", "virtual-1")
SEED = 5


def two_nodes() -> Scenario:
    """Four workers that straggle, on two nodes."""
    stragglers = Stragglers(factor=3.0, mean_normal_s=0.4, mean_slow_s=0.2, jitter=0.1)
    return virtual.scenario(ranks_per_node=2, stragglers=stragglers, time_limit_s=2.0)


@contextlib.asynccontextmanager
async def collectors(plane: ControlPlane) -> AsyncIterator[None]:
    """A collector for each virtual node, listening."""
    services = [plane.another("collector", {"DYNAMIX_NODE": node, "DYNAMIX_INSTANCE": node}) for node in NODES]
    try:
        async with plane.bus.subscribe(subjects.of("live", "collector", "*")) as beats:
            for service in services:
                service.start()
            silent = set(NODES)
            while silent:
                silent.discard(subjects.parse((await anext(beats)).subject).tokens[1])
        yield
    finally:
        for service in services:
            service.stop()


async def test_the_bus_and_one_process_give_equal_results() -> None:
    """Decisions of the arbitrator, and traces of the agents in the collectors."""
    async with control_plane("reward", "arbitrator") as plane, collectors(plane):
        for policy in ("rule", "random", "stigmergy"):
            cluster = VirtualCluster(two_nodes(), virtual.data(), seed=SEED, policy=policy, job=f"job-{policy}")
            reports: list[Report] = []
            actions = await run_lockstep(cluster, plane.bus, on_window=reports.extend)
            again: list[Report] = []
            expected = run_episode(
                *(two_nodes(), policy_named(policy)),
                data=virtual.data(),
                seed=SEED,
                job=cluster.job.job,
                on_window=again.extend,
            )
            await _check_messages(plane, expected, again)
            assert cluster.evaluations == expected.evaluations
            assert cluster.time_s == expected.virtual_time_s
            assert cluster.time_to_target_s == expected.time_to_target_s
            assert cluster.test_accuracy() == expected.test_accuracy
            assert len({row.local_batch_size for report in reports for row in report.rows}) > 2
            if policy == "stigmergy":
                subject = subjects.of("trace", cluster.job.job, subjects.ANY)
                stored = await plane.wait_for(FEED.name, subject, len(reports))
                by_place = {(message.window, message.node): message for message in stored}  # type: ignore[attr-defined]
                assert by_place == {(report.window, report.node): trace_of(report) for report in reports}
            else:
                assert [_decision(action) for action in actions] == [_decision(action) for action in expected.actions]
                assert len({action.local_batch_sizes for action in actions}) > 1


def _decision(action: Action) -> tuple[object, ...]:
    """The decision; hash and watermark name places in a stream."""
    return action.window, action.local_batch_sizes, action.allocation.split, action.carry, action.logprobs


async def _check_messages(plane: ControlPlane, expected: Episode, reports: list[Report]) -> None:
    """Windows, states and rewards are equal to the last bit, whatever the order of the two nodes."""
    name = expected.job.job
    for kind, wanted in zip((MetricWindow, State, Reward), virtual.messages_of(reports), strict=True):
        subject = subjects.of({MetricWindow: "window", State: "state", Reward: "reward"}[kind], name, "*")
        stored = await plane.wait_for(FEED.name, subject, len(reports))
        by_place = {(message.window, message.node): message for message in stored}  # type: ignore[attr-defined]
        assert by_place == {(message.window, message.node): message for message in wanted}  # type: ignore[attr-defined]
    applied = await plane.wait_for(FEED.name, subjects.of("applied", name), len(expected.applied))
    assert [_adoption(message) for message in applied] == [_adoption(message) for message in expected.applied]
    job = await plane.wait_for(JOBS.name, subjects.of("job", name), 1)
    assert isinstance(job[0], Job)
    assert (job[0].phase, job[0].end_reason) == ("ended", "completed")


def _adoption(message: object) -> tuple[object, ...]:
    assert isinstance(message, Applied)
    return message.decided_window, message.effective_step, message.local_batch_sizes
