"""The learner: waits until generations are over, learns from them in a process with torch, stores new versions.

A generation is over when its job says so, or when the next one begins. What FEED and ACTIONS hold of it is read then,
with the last rewards waited for; every few generations make a new version, which arbitrators use from the next
generation on. The bus is the only store.
"""

import asyncio
import contextlib
import multiprocessing
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from fnmatch import fnmatchcase
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from dynamix.arbitrator.deciding.signatures import reward_signatures, value_signature
from dynamix.arbitrator.learned.policy import action_set_of, metadata_of
from dynamix.arbitrator.learned.policy_file import (
    SHIPPED_VERSION,
    ActionSetName,
    Objective,
    PolicyFile,
    PolicyMetadata,
    PPOSettings,
    UpdateStats,
    shipped_policy,
)
from dynamix.arbitrator.learned.policy_store import PolicyStore
from dynamix.arbitrator.policies.registry import policy_names
from dynamix.arbitrator.policies.rule import COMPLETED
from dynamix.runtime.bus import Bus, BusError, BusMessage, FailoverWait
from dynamix.runtime.die_with_parent import begin_worker
from dynamix.runtime.metrics import Scrape
from dynamix.runtime.service import Context
from dynamix.schemas import subjects
from dynamix.schemas.codec import MalformedMessageError, decode_any
from dynamix.schemas.messages import Job, Signature
from dynamix.schemas.streams import ACTIONS, FEED, JOBS
from dynamix.schemas.subjects import check_token

from .rollout import Recording, RolloutError, trajectory_of

MAX_REMEMBERED = 1000
"""Names of generations learned from that a policy file keeps, so that a restarted learner learns from none twice."""
MAX_STALENESS = 2
"""Generations decided by a version further behind the newest than this are left out."""

COUNTERS = {
    "generations": "generations of jobs that were learned from",
    "generations_left_out": "generations that could not be learned from, with the reason in the log",
    "generations_of_other_rewards": "of those, with rewards of another formula than the policy's",
    "generations_without_last_rewards": "generations taken as cut off, since their last rewards did not come",
    "updates": "versions stored",
}
GAUGES = {"version": "newest version of the policy"}
SIGNATURES: tuple[Signature, ...] = ("reward-plateau", "reward-collapse", "value-unexplained")
"""Failure signatures of a learning curve."""

STALL_TIMEOUT_S = 60.0
"""Longest time without a message while stored ones are read."""

Refuse = Callable[[BusMessage, str], Awaitable[None]]


class LearnerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One learner learns one policy, from the jobs that run under it with the option `explore`.

    `DYNAMIX_LEARNER_<FIELD>` or `--field`.
    """

    policy: str = "ppo"
    """The name of the policy. It continues from the newest version on the bus, else from the shipped one, else new."""
    jobs: str = "*"
    """Jobs to learn from: a pattern of their names, with `*` and `?`."""
    generations_per_update: Annotated[int, Meta(ge=1)] = 4
    """Generations in a batch; each update makes a new version."""
    grace_s: Annotated[float, Meta(gt=0)] = 10.0
    """Seconds to wait for the last rewards of a generation that has ended."""
    reward_formula: Literal["auto", "paper-sgd", "paper-adam", "time-aware"] = "auto"
    """For a new policy: the value of DYNAMIX_REWARD_FORMULA of the jobs that it will learn from."""
    action_set: ActionSetName = "levers"
    """For a new policy: one choice per rank, or one for the job."""
    objective: Literal["clipped", "simplified"] = "clipped"
    """For a new policy: PPO's, or the paper's."""

    def __post_init__(self) -> None:
        """Raise ValueError for a name that cannot be a policy's."""
        if check_token(self.policy) in policy_names():
            raise ValueError(f"policy {self.policy!r} is one in code: give the learned one another name")


async def serve(context: Context[LearnerSettings]) -> None:
    """Learn until the context stops."""
    processes = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(1, processes, initializer=_begin_process, initargs=(os.getpid(),))
    try:
        await _Learner(context, executor).run()
    finally:
        await asyncio.to_thread(executor.shutdown, cancel_futures=True)  # it waits for the process


def _begin_process(parent: int) -> None:
    """Prepare the process of updates: one thread, for equal bits, and an end with its parent."""
    begin_worker(parent)
    import torch  # noqa: PLC0415 - only in this process

    torch.set_num_threads(1)


class Outcome(NamedTuple):
    """The result of an update."""

    content: bytes | None
    """The next version's file; `None` when no lesson could be used."""
    refused: list[str]
    """Lessons that could not be used, each with the reason."""
    returns: tuple[float, ...] = ()
    stats: UpdateStats | None = None


def generation_name(job: Job) -> str:
    """`<job>:<generation>`."""
    return f"{job.job}:{job.generation}"


def first_version(policy: str, action_set: ActionSetName, objective: Objective, reward_formula: str) -> bytes:
    """The file of an untrained policy."""
    from .ppo import Agent  # noqa: PLC0415 - torch: only in the process of updates

    settings = PPOSettings(objective=objective)
    metadata = metadata_of(action_set, policy=policy, settings=settings, reward_formula=reward_formula, seeds=(0,))
    return Agent.new(metadata).file().to_bytes()


def update(content: bytes, lessons: Sequence[tuple[Recording, bool]]) -> Outcome:
    """The next version of a policy, after an update from all usable lessons; with each, whether it terminated."""
    from .ppo import Agent  # noqa: PLC0415 - torch: only in the process of updates

    file = PolicyFile.from_bytes(content)
    action_set = action_set_of(file.metadata)
    trajectories, names, refused = [], [], []
    for recording, terminated in lessons:
        try:
            trajectories.append(trajectory_of(recording, action_set, terminated=terminated))
            names.append(generation_name(recording.job))
        except RolloutError as error:
            refused.append(str(error))
    if not trajectories:
        return Outcome(None, refused)
    agent = Agent.of(file)
    try:
        stats = agent.learn(trajectories)
        version = agent.file(
            parent=file.digest,
            learned_from=(*file.metadata.learned_from, *names)[-MAX_REMEMBERED:],
            reward_weights={},  # rewards on the bus name their formula, not its weights
            scores={},
        ).to_bytes()
        PolicyFile.from_bytes(version, "what an update made")
    except (ArithmeticError, RuntimeError, ValueError) as error:  # torch's for numbers that are too large
        # no version: learning from these must not end the learner, again after each restart
        return Outcome(None, [*refused, f"{', '.join(names)}: {error}"])
    return Outcome(version, refused, tuple(trajectory.total_reward for trajectory in trajectories), stats)


def ended_by(job: Job, running: dict[str, Job], policy: str, pattern: str) -> list[tuple[Job, bool]]:
    """The generations that are known to be over by a specification, oldest first, and whether each did all it meant to.

    Of those in which the policy explores, in jobs whose names match the pattern. `running` holds each job's newest
    specification; one of a generation not after that changes nothing, unless it ends that one.
    """
    before = running.get(job.job)
    if before is not None and job.generation < before.generation:
        return []
    ended = []
    if before is not None and job.generation > before.generation:
        ended.append((before, False))
    if job.phase == "running":
        running[job.job] = job
    else:
        running.pop(job.job, None)
        ended.append((job, job.end_reason == COMPLETED))
    return [
        (one, terminated)
        for one, terminated in ended
        if one.policy_options.get("explore", 0) == 1 and one.policy == policy and fnmatchcase(one.job, pattern)
    ]


@contextlib.asynccontextmanager
async def stall_limit(fault: str) -> AsyncIterator[asyncio.Timeout]:
    """Raise BusError with this fault after `STALL_TIMEOUT_S`: messages may be purged while they are read."""
    try:
        async with asyncio.timeout(STALL_TIMEOUT_S) as limit:
            yield limit
    except TimeoutError:
        raise BusError(f"{fault} within {STALL_TIMEOUT_S:g} s") from None


async def collect(bus: Bus, job: Job, *, grace_s: float, refuse: Refuse) -> Recording | None:
    """The recorded messages of a generation that is over; `None` when the intake was stopped meanwhile.

    All that is stored is read, however long that takes. Rewards pass through one more service than states: for the last
    ones this then waits at most `grace_s`. What FEED no longer holds is missing, and `refuse` gets unusable messages.

    Raises:
        BusError: when the streams cannot be read.
    """
    found, wait = Recording(job, [], [], [], []), FailoverWait(bus.stream_state, ACTIONS.name)

    async def add(message: BusMessage) -> None:
        try:
            found.add(message.sequence, decode_any(message.subject, message.payload))
        except MalformedMessageError as error:
            await refuse(message, str(error))

    async def read(stream: str, wanted: str) -> int:
        """Add all stored messages of a filter; the sequence of the last one."""
        last = 0
        async with stall_limit(f"{stream} did not deliver {wanted}") as limit:
            async for message in bus.stored(stream, [wanted]):
                limit.reschedule(asyncio.get_running_loop().time() + STALL_TIMEOUT_S)
                await add(message)
                last = message.sequence
        return last

    await read(FEED.name, subjects.of("state", job.job, subjects.ANY))
    await read(FEED.name, subjects.of("applied", job.job))
    await read(ACTIONS.name, subjects.of("action", job.job))
    while found.lacks_actions and await wait.pause():  # of several servers one that was cut off may know less
        found.actions.clear()
        await read(ACTIONS.name, subjects.of("action", job.job))
    rewards = subjects.of("reward", job.job, subjects.ANY)
    last = await read(FEED.name, rewards)  # at the end: none are read once the intake was stopped
    if found.num_unrewarded or not found.states:
        async with bus.consume(FEED.name, [rewards], start=last + 1) as consumer:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    async for batch in consumer:
                        for message in batch:
                            await add(message)
                        if not found.num_unrewarded:
                            return found
                    return None
    return found


class _Learner:
    def __init__(self, context: Context[LearnerSettings], executor: ProcessPoolExecutor) -> None:
        self._context = context
        self._settings = context.settings
        self._executor = executor
        self._store = PolicyStore(context.bus)
        self._running: dict[str, Job] = {}
        self._lessons: list[tuple[Recording, bool]] = []
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
        await self.start()
        wanted = [subjects.of("job", subjects.ANY)]
        async with self._context.bus.consume(JOBS.name, wanted, start="last_per_subject") as consumer:
            self._context.counters["ready"] = 1
            async for batch in consumer:
                for message in batch:
                    if (job := await self._context.decoded(Job, message)) is None:
                        continue
                    for ended, terminated in ended_by(job, self._running, self._settings.policy, self._settings.jobs):
                        if generation_name(ended) not in self._learned_from:
                            await self.learn_from(ended, terminated=terminated)

    async def start(self) -> None:
        """Find the newest version; without one, store a new policy, so that jobs can explore it."""
        new, name = self._settings, self._settings.policy
        stored = await self._store.find(name)
        if stored is not None:
            self._take(stored.version, stored.data)
        elif (shipped := shipped_policy(name)) is not None:
            self._take(SHIPPED_VERSION, shipped)
        else:
            wanted = (name, new.action_set, new.objective, new.reward_formula)
            loop = asyncio.get_running_loop()
            await self._put(await loop.run_in_executor(self._executor, first_version, *wanted))

    async def learn_from(self, job: Job, *, terminated: bool) -> None:
        """Learn from a generation that is over, once there are enough of them."""
        settings, log = self._settings, self._context.log
        found = await collect(self._context.bus, job, grace_s=settings.grace_s, refuse=self._context.dead_letter)
        if found is None:  # the process stops: after a restart the generation is found again
            return
        self._learned_from.add(generation_name(job))
        own = self._metadata.reward_formula
        own = f"paper-{job.optimizer_family}" if own == "auto" else own
        foreign = sorted({reward.formula for reward in found.rewards} - {own})
        behind = self._version - max((action.policy_version for action in found.actions), default=0)
        if not found.actions or not 0 <= behind <= MAX_STALENESS:
            self._context.count("generations_left_out")
            log.info("left out", job=job.job, generation=job.generation, versions_behind=behind)
        elif foreign:
            self._context.count("generations_left_out")
            self._context.count("generations_of_other_rewards")
            log.warning(
                "left out: rewards of another formula than the policy's; set DYNAMIX_REWARD_FORMULA of the reward "
                "service",
                job=job.job,
                generation=job.generation,
                formulas=foreign,
                wanted=own,
            )
        else:
            self._context.count("generations")
            if found.num_unrewarded:  # its outcome is unknown
                self._context.count("generations_without_last_rewards")
                log.warning(
                    "rewards did not come in time: taken as cut off",
                    job=job.job,
                    generation=job.generation,
                    num_unrewarded=found.num_unrewarded,
                    grace_s=settings.grace_s,
                )
            self._lessons.append((found, terminated and not found.num_unrewarded))
        if len(self._lessons) >= settings.generations_per_update:
            lessons, self._lessons = self._lessons, []
            loop = asyncio.get_running_loop()  # an update takes seconds and must not delay the heartbeat
            outcome = await loop.run_in_executor(self._executor, update, self._content, lessons)
            for reason in outcome.refused:
                self._context.count("generations_left_out")
                log.warning("left out", reason=reason)
            if outcome.content is not None and outcome.stats is not None:
                await self._put(outcome.content)
                await self._note_update(outcome.returns, outcome.stats)

    async def _note_update(self, returns: tuple[float, ...], stats: UpdateStats) -> None:
        """Report what a stored update learned, and the failures that its learning curve begins to look like."""
        self._context.count("updates")
        numbers = {"approx_kl": stats.approx_kl, "explained_variance": stats.explained_variance}
        self._context.log.info("learned", version=self._version, returns=returns, **numbers)
        self._returns += returns
        if stats.explained_variance is not None:
            self._explained.append(stats.explained_variance)
        found = [*reward_signatures(self._returns), *filter(None, [value_signature(self._explained)])]
        policy, episode = self._settings.policy, len(self._returns)
        for finding in found:
            if finding.signature not in self._signatures:  # once, when it begins
                event = finding.event(job=policy, generation=0, window=episode, service="learner")
                await self._context.bus.publish(event)
        self._signatures = {finding.signature for finding in found}

    async def _put(self, content: bytes) -> None:
        stored = await self._store.put(self._settings.policy, content)
        self._take(stored.version, content)

    def _take(self, version: int, content: bytes) -> None:
        self._version, self._content = version, content
        self._metadata = PolicyFile.from_bytes(content, f"version {version}").metadata
        self._learned_from |= set(self._metadata.learned_from)
        self._context.counters["version"] = version

    def _show(self, scrape: Scrape) -> None:
        for signature in SIGNATURES:
            found = int(signature in self._signatures)
            scrape.gauge("signature", "1 while the learning curve looks like this failure", found, signature=signature)
