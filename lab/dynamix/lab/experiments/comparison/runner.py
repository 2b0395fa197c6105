"""Run the tasks of a comparison: each is one episode under the policy of its setting."""

import time
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path

from dynamix.arbitrator.learned.policy import LearnedPolicy
from dynamix.arbitrator.learned.policy_file import PolicyFile
from dynamix.arbitrator.policies.policy import Policy
from dynamix.arbitrator.policies.registry import policy_named
from dynamix.lab.experiments.episodes.episode import run_episode
from dynamix.lab.experiments.episodes.pool import EpisodePool, workload_data

from .contenders import Setting
from .runs import RunOutcome, RunTask


def outcomes(tasks: Sequence[RunTask], *, jobs: int, data: Path | None = None) -> Iterator[tuple[RunTask, RunOutcome]]:
    """Run tasks in `jobs` processes and yield each with its outcome as it completes.

    Raises:
        EpisodeError: when an episode raises; the cause is chained.
    """
    with EpisodePool(jobs) as pool:
        for index, outcome in pool.run(partial(run_task, data=data), tasks):
            yield tasks[index], outcome


def run_task(task: RunTask, *, data: Path | None = None) -> RunOutcome:
    """Run one episode in this process."""
    setting = task.setting
    began_s = time.perf_counter()
    episode = run_episode(
        task.ruling_scenario,
        policy_of(setting),
        data=workload_data(task.scenario.workload, data),
        seed=task.seed,
        policy_options=setting.options,
        initial_local_batch_size=task.initial_local_batch_size,
    )
    return RunOutcome(
        time_to_target_s=episode.time_to_target_s,
        accuracy_at_fixed_time=episode.accuracy_at_fixed_time,
        test_accuracy=episode.test_accuracy,
        num_steps=episode.num_steps,
        num_windows=episode.num_windows,
        samples_seen=episode.samples_seen,
        virtual_time_s=episode.virtual_time_s,
        evaluations=[(evaluation.time_s, evaluation.accuracy) for evaluation in episode.evaluations],
        wall_s=time.perf_counter() - began_s,
    )


def policy_of(setting: Setting) -> Policy:
    """The policy of a setting, read from its file when it has one."""
    return _learned(setting.policy_file) if setting.policy_file else policy_named(setting.policy)


@lru_cache(maxsize=64)
def _learned(file: str) -> Policy:
    return LearnedPolicy(PolicyFile.read(Path(file)))
