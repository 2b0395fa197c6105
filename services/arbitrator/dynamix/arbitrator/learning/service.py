"""The learner's service: waits until generations are over, learns from them in a process, stores new versions."""

import asyncio
import math
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Annotated, Literal, TypeVar, TypeVarTuple

import msgspec
from msgspec import Meta

from dynamix.arbitrator.deciding.signatures import reward_signatures, value_signature
from dynamix.arbitrator.learned.policy_file import SHIPPED_VERSION, PolicyFile, PolicyMetadata, shipped_policy
from dynamix.arbitrator.learned.policy_store import PolicyStore
from dynamix.arbitrator.policies.registry import policy_names
from dynamix.runtime.bus import (
    BusError,
    BusMessage,
    ConnectionClosedError,
    PermissionDeniedError,
    StreamMissingError,
)
from dynamix.runtime.metrics import Scrape
from dynamix.runtime.service import Context
from dynamix.schemas import subjects
from dynamix.schemas.codec import MalformedMessageError, decode
from dynamix.schemas.messages import Job, Signature
from dynamix.schemas.streams import JOBS
from dynamix.schemas.subjects import check_token

from . import updating
from .collecting import Collected, Finished, Generations, collect
from .rollout import Recording
from .updating import Lesson, Outcome

NUM_KEPT_UPDATES = 4
"""Lessons for so many updates are kept while nothing can be stored on the bus."""

COUNTERS = {
    "generations": "generations of jobs that were learned from",
    "generations_left_out": "generations that could not be learned from, with the reason in the log",
    "generations_of_other_rewards": "of those, with rewards of another formula than the policy's",
    "generations_without_last_rewards": "generations taken as cut off, since their last rewards did not come",
    "updates": "versions stored",
    "updates_refused": "versions that the bus did not take, and that are kept",
}
GAUGES = {"version": "newest version of the policy"}
SIGNATURES: tuple[Signature, ...] = ("reward-plateau", "reward-collapse", "value-unexplained")
"""Failure signatures of a learning curve."""

A = TypeVarTuple("A")
R = TypeVar("R")


class LearnerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One learner learns one policy, from the jobs that run under it with the option `explore`.

    `DYNAMIX_LEARNER_<FIELD>` or `--field`.
    """

    policy: str = "ppo"
    """The name of the policy. It continues from the newest version on the bus, else from the shipped one, else new."""
    jobs: str = "*"
    """Which jobs to learn from: a pattern of their names, with `*` and `?`."""
    generations_per_update: Annotated[int, Meta(ge=1)] = 4
    """Generations in a batch; each update makes a new version."""
    max_staleness: Annotated[int, Meta(ge=0)] = 2
    """Generations decided by a version further behind the newest than this are left out."""
    grace_s: Annotated[float, Meta(gt=0)] = 10.0
    """Seconds to wait for the last rewards of a generation that has ended."""
    rewards: Literal["own", "any"] = "own"
    """`own`: generations whose rewards are of another formula than the policy's are left out; `any`: they are not."""
    reward_formula: Literal["auto", "paper-sgd", "paper-adam", "time-aware"] = "auto"
    """For a new policy: the value of DYNAMIX_REWARD_FORMULA of the jobs that it will learn from."""
    action_set: Literal["deltas", "global"] = "global"
    """For a new policy: one choice per rank, or one for the job."""
    objective: Literal["clipped", "simplified"] = "clipped"
    """For a new policy: PPO's, or the paper's."""
    seed: Annotated[int, Meta(ge=0)] = 0
    """For a new policy: the seed of its initial parameters."""

    def __post_init__(self) -> None:
        """Raise ValueError for a name that cannot be a policy's."""
        if check_token(self.policy) in policy_names():
            raise ValueError(f"policy {self.policy!r} is one in code: give the learned one another name")


async def serve(context: Context[LearnerSettings]) -> None:
    """Learn until the context stops."""
    processes = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(1, processes, initializer=updating.begin, initargs=(os.getpid(),))
    try:
        await _Learner(context, executor).run()
    finally:
        await asyncio.to_thread(executor.shutdown, cancel_futures=True)  # it waits for the process


class _Learner:
    def __init__(self, context: Context[LearnerSettings], executor: ProcessPoolExecutor) -> None:
        self._context = context
        self._settings = context.settings
        self._executor = executor
        self._store = PolicyStore(context.bus)
        self._generations = Generations(context.settings.policy, context.settings.jobs)
        self._lessons: list[Lesson] = []
        self._unstored: Outcome | None = None
        """An update that is not stored on the bus yet."""
        self._content = b""
        self._metadata: PolicyMetadata
        self._version = 0
        self._learned_from: set[str] = set()
        self._returns: list[float] = []
        self._explained: list[float] = []
        self._signatures: set[str] = set()
        context.metrics.declare(counters=COUNTERS, gauges=GAUGES)
        context.metrics.add(self._show)

    async def run(self) -> None:
        await self._start()
        wanted = [subjects.of("job", subjects.ANY)]
        async with self._context.bus.consume(JOBS.name, wanted, start="last_per_subject") as consumer:
            self._context.counters["ready"] = 1
            async for batch in consumer:
                for message in batch:
                    await self._on_job(message)

    async def _start(self) -> None:
        """Find the newest version; without one, store a new policy, so that jobs can explore it."""
        name = self._settings.policy
        stored = await self._store.find(name)
        if stored is not None:
            self._take(stored.version, stored.data)
        elif (shipped := shipped_policy(name)) is not None:
            self._take(SHIPPED_VERSION, shipped)
        else:
            new = self._settings
            await self._put(
                await self._in_process(
                    updating.first_version, name, new.action_set, new.objective, new.seed, new.reward_formula
                )
            )

    async def _on_job(self, message: BusMessage) -> None:
        try:
            job = decode(Job, message.subject, message.payload)
        except MalformedMessageError as error:
            await self._context.dead_letter(message, str(error))
            return
        for finished in self._generations.observe_job(job):
            if finished.name not in self._learned_from:
                await self._on_finished(finished)

    async def _on_finished(self, finished: Finished) -> None:
        collected = await collect(
            self._context.bus, finished.job, grace_s=self._settings.grace_s, refuse=self._context.dead_letter
        )
        if collected is None:  # the process stops: after a restart the generation is found again
            return
        self._learned_from.add(finished.name)
        await self._store_update()
        if self._is_wanted(finished, collected.recording):
            self._context.count("generations")
            self._lessons.append(self._lesson(finished, collected))
        limit = self._settings.generations_per_update
        if self._unstored is not None:
            self._lessons = self._lessons[-NUM_KEPT_UPDATES * limit :]
        elif len(self._lessons) >= limit:
            lessons, self._lessons = self._lessons, []
            await self._learn(lessons)

    def _is_wanted(self, finished: Finished, recording: Recording) -> bool:
        behind = self._version - max((action.policy_version for action in recording.actions), default=0)
        usable = recording.actions and 0 <= behind <= self._settings.max_staleness
        foreign = updating.foreign_formulas(self._metadata, recording)
        if usable and (not foreign or self._settings.rewards == "any"):
            return True
        self._context.count("generations_left_out")
        if not usable:
            self._context.log.info("left out", **_named(finished), versions_behind=behind)
            return False
        self._context.count("generations_of_other_rewards")
        self._context.log.warning(
            "left out: rewards of another formula than the policy's; set DYNAMIX_REWARD_FORMULA of the reward service, "
            "or DYNAMIX_LEARNER_REWARDS=any",
            **_named(finished),
            formulas=foreign,
            wanted=self._metadata.reward_formula,
        )
        return False

    def _lesson(self, finished: Finished, collected: Collected) -> Lesson:
        """The trajectory of a generation; without its last rewards it counts as cut off."""
        if collected.num_unrewarded:
            self._context.count("generations_without_last_rewards")
            self._context.log.warning(
                "rewards did not come in time: taken as cut off",
                **_named(finished),
                num_unrewarded=collected.num_unrewarded,
                grace_s=self._settings.grace_s,
            )
        terminated = finished.terminated and not collected.num_unrewarded
        return Lesson(finished.name, collected.recording, terminated)

    async def _learn(self, lessons: list[Lesson]) -> None:
        outcome: Outcome = await self._in_process(updating.update, self._content, lessons)
        for reason in outcome.refused:
            self._context.count("generations_left_out")
            self._context.log.warning("left out", reason=reason)
        if outcome.content is not None:
            self._unstored = outcome
            await self._store_update()

    async def _store_update(self) -> None:
        """Store the update that is not stored yet; when the bus refuses it, retry after the next generation."""
        outcome = self._unstored
        if outcome is None or outcome.content is None:
            return
        try:
            await self._put(outcome.content)
        except (ConnectionClosedError, PermissionDeniedError, StreamMissingError):
            raise
        except BusError as error:
            self._context.count("updates_refused")
            self._context.log.error("the bus did not take a new version: it is kept", reason=str(error))
            return
        self._unstored = None
        self._context.count("updates")
        self._context.log.info(
            "learned",
            version=self._version,
            returns=outcome.returns,
            approx_kl=outcome.approx_kl,
            explained_variance=outcome.explained_variance,
        )
        await self._watch(outcome)

    async def _put(self, content: bytes) -> None:
        stored = await self._store.put(self._settings.policy, content)
        self._take(stored.version, content)

    def _take(self, version: int, content: bytes) -> None:
        self._version, self._content = version, content
        self._metadata = PolicyFile.from_bytes(content, f"version {version}").metadata
        self._learned_from |= set(self._metadata.learned_from)
        self._context.counters["version"] = version

    async def _watch(self, outcome: Outcome) -> None:
        """Publish each failure signature once, when it begins."""
        self._returns += outcome.returns
        if math.isfinite(outcome.explained_variance):
            self._explained.append(outcome.explained_variance)
        found = [*reward_signatures(self._returns), *filter(None, [value_signature(self._explained)])]
        policy, episode = self._settings.policy, len(self._returns)
        for finding in found:
            if finding.signature not in self._signatures:
                event = finding.event(job=policy, generation=0, window=episode, service="learner")
                await self._context.bus.publish(event)
        self._signatures = {finding.signature for finding in found}

    def _show(self, scrape: Scrape) -> None:
        for signature in SIGNATURES:
            found = int(signature in self._signatures)
            scrape.gauge("signature", "1 while the learning curve looks like this failure", found, signature=signature)

    async def _in_process(self, work: Callable[[*A], R], *args: *A) -> R:
        """Run in the process that has torch: an update takes seconds and must not delay the heartbeat."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work, *args)


def _named(finished: Finished) -> dict[str, str | int]:
    """Fields of a log line about a generation."""
    return {"job": finished.job.job, "generation": finished.job.generation}
