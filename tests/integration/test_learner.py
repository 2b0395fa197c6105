"""Learning from live jobs: real services, a real broker, virtual clusters that explore."""

import asyncio

import pytest
from tests.support import virtual
from tests.support.control_plane import ControlPlane, control_plane
from tests.support.lockstep import run_lockstep

from dynamix.arbitrator.learned.policy import JobLevers, LearnedPolicy
from dynamix.arbitrator.learned.policy_file import PolicyFile
from dynamix.arbitrator.learning.ppo import Agent
from dynamix.arbitrator.learning.rollout import Recording, Trajectory, trajectory_of
from dynamix.cli.services import wait_until_ready
from dynamix.lab.simulator.cluster import VirtualCluster
from dynamix.lab.simulator.episode import run_episode
from dynamix.schemas import subjects
from dynamix.schemas.messages import PolicyVersion, Report
from dynamix.schemas.streams import POLICIES

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
