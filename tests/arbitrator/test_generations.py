"""Which generations a learner takes to be over, and which of them are its own."""

from typing import Any

from tests.support import examples

from dynamix.arbitrator.learning.collecting import Finished, Generations
from dynamix.schemas.messages import Job


def job(generation: int = 0, phase: str = "running", **changes: Any) -> Job:
    fields: dict[str, Any] = {"policy": "ppo", "policy_options": {"explore": 1.0}}
    return examples.job(generation=generation, phase=phase, **(fields | changes))


def test_an_ended_job_is_over_and_terminated_only_when_it_completed() -> None:
    watch = Generations("ppo", "*")
    assert watch.observe_job(job()) == []
    ended = job(phase="ended", end_reason="completed")
    assert watch.observe_job(ended) == [Finished(ended, terminated=True)]
    broken = job(phase="ended", end_reason="RuntimeError: out of memory", job="other-0a1b2c3d")
    assert watch.observe_job(broken) == [Finished(broken, terminated=False)]


def test_a_restart_cuts_the_generation_before_it_off() -> None:
    watch = Generations("ppo", "*")
    first = job()
    watch.observe_job(first)
    assert watch.observe_job(job(generation=1)) == [Finished(first, terminated=False)]
    assert watch.observe_job(job(generation=1)) == []


def test_an_end_seen_alone_is_enough_and_ends_the_generation_before_it_too() -> None:
    watch = Generations("ppo", "*")
    watch.observe_job(job())
    ended = job(generation=2, phase="ended", end_reason="completed")
    assert [finished.job.generation for finished in watch.observe_job(ended)] == [0, 2]


def test_a_specification_that_comes_late_changes_nothing() -> None:
    watch = Generations("ppo", "*")
    watch.observe_job(job(generation=3))
    assert watch.observe_job(job(generation=1)) == []
    assert watch.observe_job(job(generation=2, phase="ended")) == []


def test_jobs_that_do_not_explore_or_are_another_policys_or_not_wanted_are_left_alone() -> None:
    watch = Generations("ppo", "mnist-*")
    for changes in ({"policy_options": {}}, {"policy": "rule"}, {"job": "cifar-0a1b2c3d"}):
        assert watch.observe_job(job(phase="ended", end_reason="completed", **changes)) == []
    (finished,) = watch.observe_job(job(phase="ended", end_reason="completed"))
    assert finished.name == f"{examples.JOB}:0"
