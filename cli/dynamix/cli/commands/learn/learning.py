"""What `dynamix learn` does: make the plan, learn it with a line per update, write and tell what came of it."""

import argparse
import asyncio
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from dynamix.arbitrator.deciding.signatures import Finding
from dynamix.arbitrator.learned.policy_file import PolicyFile
from dynamix.arbitrator.learned.policy_store import PolicyStore
from dynamix.arbitrator.learned.ppo_settings import PPOSettings
from dynamix.cli.broker import connected
from dynamix.cli.connection import find
from dynamix.cli.errors import CommandError
from dynamix.cli.output import POLICY, STANDARD_OUTPUT, write_json
from dynamix.lab.experiments.episodes.suite import TRAIN, read_suite, suite_named
from dynamix.lab.experiments.learning import PRESETS, LearningPlan, LearningResult, LearningUpdate, learn, plan_named
from dynamix.lab.experiments.learning.checkpoint import KIND, LearningCheckpointError
from dynamix.lab.experiments.learning.workers import EpisodeError
from dynamix.reward.formula import TIME_ONLY, Weights
from dynamix.runtime import output_files
from dynamix.runtime.output_files import RefusedOutputError
from dynamix.runtime.settings import BusSettings
from dynamix.schemas.messages import Message

from .command import WEIGHTS, output_of, settings_given

INTERRUPTED = 130
SERVICE = "learn"


def learn_and_tell(namespace: argparse.Namespace, changes: dict[str, Any]) -> int:
    """Learn what the arguments ask for; returns the exit code."""
    with _sentences():
        plan = _plan(namespace, changes)
        output, checkpoint = _files(namespace)
        if namespace.restart:
            checkpoint.unlink(missing_ok=True)
        teller = _Teller(plan, find(os.environ) if namespace.publish else None)
        try:
            learned = learn(
                plan,
                num_workers=namespace.workers,
                checkpoint=checkpoint,
                log=namespace.log,
                minutes=namespace.minutes,
                data=None if namespace.data is None else Path(namespace.data),
                observer=teller.tell,
            )
        except KeyboardInterrupt:
            print(f"\ninterrupted: the same command goes on from {checkpoint}", file=sys.stderr)
            return INTERRUPTED
        output_files.write(output, learned.file.to_bytes(), streams=False)
        if learned.finished:
            checkpoint.unlink(missing_ok=True)
        teller.conclude(learned, output)
        if namespace.json is not None:
            write_json(_as_json(learned), namespace.json)
        if namespace.json != STANDARD_OUTPUT:
            print(_summary(learned, output, checkpoint))
    return 0


@contextlib.contextmanager
def _sentences() -> Iterator[None]:
    """What a person can put right is said in a sentence."""
    try:
        yield
    except RefusedOutputError as error:
        raise CommandError(str(error), exit_code=2) from error
    except (ValueError, OSError, LearningCheckpointError, EpisodeError) as error:
        raise CommandError(str(error)) from error


def _files(namespace: argparse.Namespace) -> tuple[Path, Path]:
    """The policy and the checkpoint beside it, as long as both may be written."""
    output = output_of(namespace)
    checkpoint = output.with_name(output.name + ".checkpoint")
    output_files.check(output, POLICY, streams=False)
    output_files.check(checkpoint, KIND, streams=False)
    return output, checkpoint


def _plan(namespace: argparse.Namespace, changes: dict[str, Any]) -> LearningPlan:
    suite = suite_named(TRAIN) if namespace.scenarios == TRAIN else read_suite(Path(namespace.scenarios))
    try:
        plan = plan_named(namespace.policy, suite.scenarios, **changes, **_reward(namespace))
    except ValueError as error:
        raise CommandError(str(error), exit_code=2) from error
    settings = {**msgspec.to_builtins(plan.settings), **settings_given(namespace)}
    try:
        return msgspec.structs.replace(plan, settings=msgspec.convert(settings, PPOSettings))
    except msgspec.ValidationError as error:
        raise CommandError(
            f"--ppo: {error}: known are {', '.join(PPOSettings.__struct_fields__)}", exit_code=2
        ) from error


def _reward(namespace: argparse.Namespace) -> dict[str, Any]:
    """Formula and weights: given ones replace the defaults of the formula that is used."""
    preset = PRESETS.get(namespace.policy, PRESETS["ppo"])
    formula: Any = preset.get("formula", "time-aware")
    if namespace.reward is not None:
        formula = None if namespace.reward == "auto" else namespace.reward
    plain = TIME_ONLY if formula == "time-aware" else Weights()
    given = {name: value for name in WEIGHTS if (value := getattr(namespace, name)) is not None}
    return {"formula": formula, "weights": msgspec.structs.replace(plain, **given)}


class _Teller:
    """A line per update on standard error, and events on the bus when it was asked for."""

    def __init__(self, plan: LearningPlan, bus: BusSettings | None) -> None:
        self._plan = plan
        self._bus = bus

    def tell(self, row: LearningUpdate, begun: Sequence[Finding]) -> None:
        """One update."""
        validated = "" if row.validation_vs_rule is None else f", validated {row.validation_vs_rule:.3f}"
        explained = "" if row.explained_variance is None else f"  explained {row.explained_variance:+.2f}"
        num_updates = self._plan.num_updates
        left_s = row.elapsed_s / row.update * (num_updates - row.update)
        print(
            f"update {row.update}/{num_updates}  episodes {row.num_episodes}  return {row.mean_return:+.3f}  "
            f"time vs rule {row.vs_rule:.3f}{validated}  missed {row.num_missed}  entropy {row.entropy:.2f}  "
            f"kl {row.approx_kl:.4f}{explained}  {left_s / 60:.0f} min left",
            file=sys.stderr,
            flush=True,
        )
        for finding in begun:
            print(f"  {finding.signature}: {finding.explanation}", file=sys.stderr)
        if begun and self._bus is not None:
            events: list[Message] = [
                found.event(job=self._plan.policy, generation=0, window=row.num_episodes, service=SERVICE)
                for found in begun
            ]
            asyncio.run(_publish(self._bus, events))

    def conclude(self, learned: LearningResult, output: Path) -> None:
        """Store the policy on the bus, when that was asked for and the plan is done."""
        if self._bus is not None and learned.finished:
            version = asyncio.run(_store(self._bus, learned.file))
            print(f"{output} is version {version} of {learned.file.metadata.policy} on the bus", file=sys.stderr)


async def _publish(settings: BusSettings, messages: Sequence[Message]) -> None:
    async with connected(settings, SERVICE) as bus:
        for message in messages:
            await bus.publish(message)


async def _store(settings: BusSettings, file: PolicyFile) -> int:
    async with connected(settings, SERVICE) as bus:
        stored = await PolicyStore(bus).put(
            file.metadata.policy, file.to_bytes(), feature_version=file.metadata.feature_version
        )
        return stored.version


def _summary(learned: LearningResult, output: Path, checkpoint: Path) -> str:
    scores = learned.file.metadata.scores
    lines = [f"{'scenario':<28}time to target over rule's"]
    lines += [
        f"{name.removeprefix('vs_rule/'):<28}{ratio:.3f}"
        for name, ratio in sorted(scores.items())
        if name.startswith("vs_rule/")
    ]
    lines.append(f"{'all (geometric mean)':<28}{scores['vs_rule']:.3f}  ({scores['num_runs']:.0f} runs each)")
    lines.append(f"wrote {output}")
    if not learned.finished:
        lines.append(f"the time was over before the plan was done: the same command goes on from {checkpoint}")
    return "\n".join(lines)


def _as_json(learned: LearningResult) -> dict[str, Any]:
    metadata = msgspec.to_builtins(learned.file.metadata)
    return {
        "finished": learned.finished,
        "digest": learned.file.digest,
        "metadata": {
            name: metadata[name] for name in ("policy", "action_set", "scores", "settings", "scenarios", "seeds")
        },
        "updates": [{**msgspec.to_builtins(row), "mean_return": row.mean_return} for row in learned.history],
    }
