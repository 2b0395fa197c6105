"""Train a real job on this machine three times: left alone, divided by speed, and steered.

A 4-process gloo job trains a small CNN on Fashion-MNIST to one held-out accuracy: `static`, as plain DDP does; by
default, with the same global batch divided by measured speed; and with an adaptive global batch, which a policy moves.
Its ranks are PACED: they sleep to a stated time per sample, one of them three times longer.
"""

import argparse
import asyncio
import signal
import sys

from dynamix.cli.errors import CommandError, explained
from dynamix.cli.numbers import count, number, seed
from dynamix.cli.output import (
    STANDARD_OUTPUT,
    add_json_argument,
    add_option,
    add_png_argument,
    output_directory,
    write_json,
)
from dynamix.runtime.extensions import extension_names
from dynamix.schemas.messages.policies import DEFAULT_POLICY, OUR_POLICIES
from dynamix.schemas.spelling import suggestion

from .plan import DemoPlan, variants

DEFAULTS = DemoPlan()
MAX_WINDOWS, MAX_PACE_S, MAX_SLOWDOWN = 100_000, 10.0, 1000.0
"""Beyond these a typing error is more likely than a wish."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--data", metavar="DIR", help="directory with Fashion-MNIST's four idx files")
    parser.add_argument("--dashboard", action="store_true", help="show the jobs as a web page while they train")
    parser.add_argument(
        "--captures", metavar="DIR", type=output_directory, help="keep each run as a capture, DIR/POLICY.dxc"
    )
    add_json_argument(parser)
    add_png_argument(parser, "write the picture (default: %(default)s)", default="dynamix-demo.png")
    what = "what moves the adaptive global batch of the last run"
    add_option(parser, "--policy", DEFAULT_POLICY, what, type=_policy)
    what = "held-out accuracy to reach"
    add_option(parser, "--target", DEFAULTS.target_accuracy, what, type=number(0, 1, above=True))
    what = "least number of windows per run"
    add_option(parser, "--windows", DEFAULTS.min_windows, what, type=count(1, MAX_WINDOWS))
    what = "seconds per sample of a rank"
    add_option(parser, "--pace", DEFAULTS.pace_s_per_sample, what, type=number(0, MAX_PACE_S))
    what = "how many times slower rank 3 is"
    add_option(parser, "--slowdown", DEFAULTS.slowdown, what, type=number(0, MAX_SLOWDOWN, above=True))
    what = "of the order of the samples and of the model's parameters"
    add_option(parser, "--seed", DEFAULTS.seed, what, type=seed)


def run(arguments: argparse.Namespace) -> int:
    """Run the jobs one after the other; 0 when all reached the target."""
    from dynamix.lab.workloads.datasets import fashion_mnist

    from .figure import draw
    from .page import demo_page
    from .runner import TrainingFailedError, run_demo
    from .view import DemoProgress, introduction, show

    with explained(OSError, ValueError, TimeoutError, TrainingFailedError):
        for split in ("train", "test"):  # fail now rather than after a minute
            fashion_mnist(split, arguments.data)
        plan, compared = _plan(arguments), variants(arguments.policy)
        with DemoProgress(plan) as progress:
            progress.write_line(introduction(plan, compared))
            try:
                page = demo_page(progress.write_line) if arguments.dashboard else None
                shown = (progress.write_line, progress.show_window)
                runs = asyncio.run(run_demo(plan, compared, *shown, page=page, captures=arguments.captures))
            except asyncio.CancelledError:
                raise CommandError("ended by SIGTERM", exit_code=128 + signal.SIGTERM) from None
    draw(runs, plan, arguments.png)
    show(runs, stderr=arguments.json == STANDARD_OUTPUT)
    print(f"Picture: {arguments.png}", file=sys.stderr)
    write_json({"runs": [run.summary for run in runs]}, arguments.json)
    return 0 if all(run.summary.time_to_target_s is not None for run in runs) else 1


def _policy(text: str) -> str:
    """An argument's type: a policy that the demo's own arbitrator has; there is no other on its new broker."""
    known = sorted({*OUR_POLICIES, *extension_names("dynamix.policies")})
    if text not in known:
        raise argparse.ArgumentTypeError(f"no policy is called {text[:64]!r}{suggestion(text[:64], known)}")
    return text


def _plan(arguments: argparse.Namespace) -> DemoPlan:
    return DemoPlan(
        data=arguments.data,
        target_accuracy=arguments.target,
        min_windows=arguments.windows,
        max_windows=max(DEFAULTS.max_windows, arguments.windows),
        pace_s_per_sample=arguments.pace,
        slowdown=arguments.slowdown,
        seed=arguments.seed,
    )
