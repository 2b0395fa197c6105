"""Learn a policy by PPO on an analytic surrogate of virtual clusters, and write it to a file.

`ppo` learns to move batch, period of averagings and codec of a job, `ppo-paper` the size of each rank, as published.
Only scenarios with learn = true are used. Killed or interrupted, run the same command again to continue: the result is
bit-identical. The version with the best validation score (time to the target against `rule`, in virtual clusters) is
written, with its score on other seeds; try it with `dynamix policy test`, judge it with `dynamix evaluate`.

  dynamix learn --policy ppo-paper --set formula=null --set beta=0.3 --set delta=0    by the published reward
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dynamix.cli.arguments import (
    add_data_argument,
    add_json_argument,
    add_list,
    add_option,
    add_output_argument,
    add_png_argument,
    seed,
)
from dynamix.cli.errors import INTERRUPTED, MISUSED, MisuseError, explained
from dynamix.cli.output import POLICY, write_file, write_result
from dynamix.runtime import output_files
from dynamix.schemas.spelling import suggestion

if TYPE_CHECKING:
    from dynamix.arbitrator.deciding.signatures import Finding
    from dynamix.lab.learning import LearningPlan, LearningUpdate


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    what = "a suite, or a directory (default: varying/train for ppo, published/train for ppo-paper)"
    parser.add_argument("--scenarios", metavar="SUITE", help=what)
    parser.add_argument("--policy", default="ppo", help="ppo, ppo-paper, or another name: ppo's preset")
    add_option(parser, "--seed", 0, "random seed of the learning", type=seed)
    add_output_argument(parser, POLICY, "default: POLICY-SEED.safetensors")
    add_option(parser, "--workers", 2, "worker processes")
    add_data_argument(parser)
    what = "change the preset: a field of LearningPlan, Weights or PPOSettings, e.g. num_updates=200 or clip_coef=0.1"
    add_list(parser, "--set", "NAME=VALUE", what)
    add_json_argument(parser)
    add_png_argument(parser, "draw the curves of learning")


def run(arguments: argparse.Namespace) -> int:
    """Learn; 0 when the plan is done, 130 when it was interrupted: the same command continues then."""
    from dynamix.lab.learning import learn
    from dynamix.lab.learning.run import KIND, LearningCheckpointError
    from dynamix.lab.simulator.episode import EpisodeError

    with explained(ValueError, OSError, LearningCheckpointError, EpisodeError):
        plan = _plan(arguments)
        output = Path(arguments.output or f"{arguments.policy}-{arguments.seed}.safetensors")
        checkpoint = output.with_name(output.name + ".checkpoint")
        output_files.check(output, POLICY, force=arguments.force)
        output_files.check(checkpoint, KIND)

        seen: dict[str, LearningUpdate] = {}

        def report(update: "LearningUpdate", begun: "Sequence[Finding]") -> None:
            """Print one update, and the failure signatures that began with it."""
            validated = "" if update.validation_vs_rule is None else f", validated {update.validation_vs_rule:.3f}"
            first = seen.setdefault("first", update)  # what came before it, the times of `rule`, does not count
            each_s = (update.elapsed_s - first.elapsed_s) / max(update.update - first.update, 1)
            left_s = each_s * (plan.num_updates - update.update)
            print(
                f"update {update.update}/{plan.num_updates}  return {update.mean_return:+.3f}  "
                f"entropy {update.stats.entropy:.2f}  kl {update.stats.approx_kl:.4f}{validated}  "
                f"{left_s / 60:.0f} min left",
                *(f"  {finding.signature}: {finding.explanation}" for finding in begun),
                sep="\n",
                file=sys.stderr,
                flush=True,
            )

        try:
            learned = learn(
                plan,
                num_workers=arguments.workers,
                checkpoint=checkpoint,
                data=arguments.data,
                observer=report,
            )
        except KeyboardInterrupt:
            print(f"\ninterrupted: the same command continues from {checkpoint}", file=sys.stderr)
            return INTERRUPTED
        write_file(output, learned.file.to_bytes())
        checkpoint.unlink(missing_ok=True)
        scores, prefix = learned.file.metadata.scores, "vs_rule/"
        lines = [f"{name.removeprefix(prefix):<28}{scores[name]:.3f}" for name in sorted(scores) if prefix in name]
        lines = ["time to target / time of rule", *lines, f"{'all (geometric mean)':<28}{scores['vs_rule']:.3f}"]
        lines.append(f"wrote {output}")
        document = {
            "digest": learned.file.digest,
            "metadata": learned.file.metadata,
            "updates": [{**msgspec.to_builtins(row), "mean_return": row.mean_return} for row in learned.history],
        }
        write_result(document, "\n".join(lines), arguments.json)
        if arguments.png is not None:
            draw(learned.history, arguments.png)
    return 0


def draw(history: "Sequence[LearningUpdate]", path: str) -> None:
    """Write a PNG with a panel per number of an update."""
    from matplotlib.figure import Figure

    from dynamix.cli.figures import finish, save

    figure = Figure(figsize=(9, 9), layout="constrained")
    names = ("mean_return", "validation_vs_rule", "entropy", "explained_variance", "approx_kl", "clipfrac")
    for name, axes in zip(names, figure.subplots(3, 2, sharex=True).flat, strict=True):
        values = [(row.update, getattr(row if hasattr(row, name) else row.stats, name)) for row in history]
        points = [(update, value) for update, value in values if value is not None]
        if points:
            axes.plot(*zip(*points, strict=True), marker=".")
        finish(axes, from_zero=False, title=name, xlabel="update")
    save(figure, path)


def _plan(arguments: argparse.Namespace) -> "LearningPlan":
    """The preset of the policy with the changes of `--set`. Weights that are not given are those of the formula."""
    from dynamix.lab.learning import PRESETS, LearningPlan, plan_named
    from dynamix.lab.learning.run import SUITE_OF
    from dynamix.lab.simulator.scenario import suite_named
    from dynamix.reward.formula import TIME_ONLY, Weights

    action_set = PRESETS.get(arguments.policy, PRESETS["ppo"]).get("action_set", "levers")
    suite = suite_named(arguments.scenarios or SUITE_OF["deltas" if action_set == "deltas" else "levers"])
    default = plan_named(arguments.policy, suite.scenarios, seed=arguments.seed)
    given: dict[type[msgspec.Struct], dict[str, Any]] = {LearningPlan: {}, Weights: {}, type(default.settings): {}}
    for text in arguments.set:
        name, separator, value = text.partition("=")
        owner = next((struct for struct in given if name in struct.__struct_fields__), None)
        if not separator:
            raise MisuseError(f"--set {text!r}: write NAME=VALUE, for example clip_coef=0.1")
        if owner is None:
            known = [field for struct in given for field in struct.__struct_fields__]
            raise MisuseError(f"--set {name}: there is no such setting{suggestion(name, known)}")
        try:
            given[owner][name] = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            given[owner][name] = value
    changes = {"seed": arguments.seed, **given[LearningPlan]}
    formula = {"formula": default.formula, **changes}["formula"]
    weights = TIME_ONLY if formula == "time-aware" else Weights()
    settings = type(default.settings)
    with explained(ValueError, exit_code=MISUSED):
        changes["weights"] = msgspec.convert({**msgspec.structs.asdict(weights), **given[Weights]}, Weights)
        changes["settings"] = msgspec.convert({**msgspec.structs.asdict(default.settings), **given[settings]}, settings)
        return plan_named(arguments.policy, suite.scenarios, **changes)
