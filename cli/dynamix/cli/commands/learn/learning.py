"""Learning a policy: the plan from the arguments, a line per update, and the files."""

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from dynamix.arbitrator.deciding.signatures import Finding
from dynamix.arbitrator.learned.policy_file import PolicyFile, PPOSettings
from dynamix.arbitrator.learned.policy_store import PolicyStore
from dynamix.cli.connection import connected, find
from dynamix.cli.errors import INTERRUPTED, MISUSED, CommandError, MisuseError, explained
from dynamix.cli.output import POLICY, write_file, write_result
from dynamix.lab.learning import PRESETS, LearningPlan, LearningResult, LearningUpdate, learn, plan_named
from dynamix.lab.learning.run import KIND, LearningCheckpointError
from dynamix.lab.simulator.episode import EpisodeError
from dynamix.lab.simulator.scenario import TRAIN, read_suite, suite_named
from dynamix.reward.formula import TIME_ONLY, Weights
from dynamix.runtime import output_files
from dynamix.runtime.bus import BusError
from dynamix.runtime.settings import BusSettings
from dynamix.schemas.messages import Message

from . import WEIGHTS

SERVICE = "learn"


def learn_policy(arguments: argparse.Namespace) -> int:
    """Learn what the arguments ask for; the exit code."""
    with explained(ValueError, OSError, LearningCheckpointError, EpisodeError):
        plan = _plan(arguments)
        if arguments.publish and plan.action_set == "appetite":
            raise MisuseError("--publish: agents decide by a file, not by one on the bus: see DYNAMIX_COLLECTOR_AGENTS")
        output, checkpoint = _files(arguments)
        if arguments.restart:
            checkpoint.unlink(missing_ok=True)
        reporter = _LearningReporter(plan, find(os.environ) if arguments.publish else None)
        reporter.check()
        try:
            learned = learn(
                plan,
                num_workers=arguments.workers,
                checkpoint=checkpoint,
                minutes=arguments.minutes,
                data=arguments.data,
                observer=reporter.report,
            )
        except KeyboardInterrupt:
            print(f"\ninterrupted: the same command continues from {checkpoint}", file=sys.stderr)
            return INTERRUPTED
        write_file(output, learned.file.to_bytes())
        if learned.finished:
            checkpoint.unlink(missing_ok=True)
        write_result(_as_json(learned), _summary(learned, output, checkpoint), arguments.json)
        if learned.finished:
            reporter.store(learned, output)
    return 0


def _files(arguments: argparse.Namespace) -> tuple[Path, Path]:
    """The policy file and the checkpoint beside it, checked."""
    output = Path(arguments.output or f"{arguments.policy}-{arguments.seed}.safetensors")
    checkpoint = output.with_name(output.name + ".checkpoint")
    output_files.check(output, POLICY, force=arguments.force)
    output_files.check(checkpoint, KIND)
    return output, checkpoint


def _plan(arguments: argparse.Namespace) -> LearningPlan:
    suite = suite_named(TRAIN) if arguments.scenarios == TRAIN else read_suite(Path(arguments.scenarios))
    with explained(ValueError, exit_code=MISUSED):
        plan = plan_named(arguments.policy, suite.scenarios, **_changes(arguments), **_reward(arguments))
    settings = {**msgspec.to_builtins(plan.settings), **_settings_given(arguments)}
    try:
        return msgspec.structs.replace(plan, settings=msgspec.convert(settings, PPOSettings))
    except msgspec.ValidationError as error:
        known = ", ".join(PPOSettings.__struct_fields__)
        raise MisuseError(f"--ppo: {error}: known are {known}") from error


def _changes(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields of the preset that the arguments change."""
    given = {
        "seed": arguments.seed,
        "num_episodes": arguments.episodes,
        "episodes_per_update": arguments.episodes_per_update,
        "validate_every": arguments.validate_every,
        "action_set": arguments.actions,
        "episode_end": arguments.episode_end,
        "select": arguments.select,
        "curriculum": arguments.curriculum,
    }
    return {name: value for name, value in given.items() if value is not None}


def _settings_given(arguments: argparse.Namespace) -> dict[str, Any]:
    """PPO's settings among the arguments."""
    given: dict[str, Any] = {} if arguments.objective is None else {"objective": arguments.objective}
    for text in arguments.ppo:
        name, separator, value = text.partition("=")
        if not separator:
            raise MisuseError(f"--ppo {text!r}: write NAME=VALUE, for example clip_coef=0.1")
        try:
            given[name] = msgspec.json.decode(value)
        except RecursionError:
            raise MisuseError(f"--ppo {name}: the value is nested too deeply") from None
        except msgspec.DecodeError:
            given[name] = value
    return given


def _reward(arguments: argparse.Namespace) -> dict[str, Any]:
    """Formula and weights: those given replace the defaults of the formula."""
    preset = PRESETS.get(arguments.policy, PRESETS["ppo"])
    formula: Any = preset.get("formula", "time-aware")
    if arguments.reward is not None:
        formula = None if arguments.reward == "auto" else arguments.reward
    defaults = TIME_ONLY if formula == "time-aware" else Weights()
    given = {name: value for name in WEIGHTS if (value := getattr(arguments, name)) is not None}
    return {"formula": formula, "weights": msgspec.structs.replace(defaults, **given)}


class _LearningReporter:
    """A line per update on standard error, and events on the bus when it was asked for."""

    def __init__(self, plan: LearningPlan, bus: BusSettings | None) -> None:
        self._plan = plan
        self._bus = bus

    def check(self) -> None:
        """See that the bus is there, before anything is learned. Raises CommandError."""
        if self._bus is not None:
            asyncio.run(_publish(self._bus, ()))

    def report(self, row: LearningUpdate, begun: Sequence[Finding]) -> None:
        """Print one update, and publish the failure signatures that began with it."""
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
            try:
                asyncio.run(_publish(self._bus, events))
            except (CommandError, BusError) as error:
                print(f"  not published: {error}; learning goes on", file=sys.stderr)

    def store(self, learned: LearningResult, output: Path) -> None:
        """Store the policy on the bus, when that was asked for."""
        if self._bus is not None:
            version = asyncio.run(_store(self._bus, learned.file))
            print(f"{output} is version {version} of {learned.file.metadata.policy} on the bus", file=sys.stderr)


async def _publish(settings: BusSettings, messages: Sequence[Message]) -> None:
    async with connected(settings, SERVICE) as bus:
        for message in messages:
            await bus.publish(message)


async def _store(settings: BusSettings, file: PolicyFile) -> int:
    async with connected(settings, SERVICE) as bus:
        return (await PolicyStore(bus).put(file.metadata.policy, file.to_bytes())).version


def _summary(learned: LearningResult, output: Path, checkpoint: Path) -> str:
    scores, prefix = learned.file.metadata.scores, "vs_rule/"
    each = sorted((name.removeprefix(prefix), score) for name, score in scores.items() if name.startswith(prefix))
    lines = [
        f"{'scenario':<28}time to target / time of rule",
        *(f"{scenario:<28}{ratio:.3f}" for scenario, ratio in each),
        f"{'all (geometric mean)':<28}{scores['vs_rule']:.3f}  ({scores['num_runs']:.0f} runs each)",
        f"wrote {output}",
    ]
    if not learned.finished:
        lines.append(f"the time limit ended the plan early: the same command continues from {checkpoint}")
    return "\n".join(lines)


def _as_json(learned: LearningResult) -> dict[str, Any]:
    metadata = msgspec.to_builtins(learned.file.metadata)
    shown = ("policy", "action_set", "scores", "settings", "scenarios", "seeds")
    return {
        "finished": learned.finished,
        "digest": learned.file.digest,
        "metadata": {name: metadata[name] for name in shown},
        "updates": [{**msgspec.to_builtins(row), "mean_return": row.mean_return} for row in learned.history],
    }
