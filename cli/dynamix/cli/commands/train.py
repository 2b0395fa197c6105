"""Start a training script with torchrun, connected to the bus.

  dynamix train --name mnist -- --standalone --nproc-per-node 4 --max-restarts 3 train.py --epochs 10

Everything after `--` is passed to torchrun unchanged. The job's id ends in a run id that is generated here, so that it
stays the same when torchrun restarts the ranks.
"""

import argparse
import importlib.util
import itertools
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from dynamix.cli.connection import find
from dynamix.cli.errors import CommandError, MisuseError, explained
from dynamix.cli.services import bus_environment
from dynamix.runtime.settings import BusSettings, check_bus, credential_in, redact_url
from dynamix.schemas import subjects
from dynamix.schemas.subjects import MAX_NAME, check_token, new_run_id

JOB, NAME, RUN_ID = "DYNAMIX_JOB", "DYNAMIX_TRAINER_NAME", "DYNAMIX_TRAINER_RUN_ID"
ELASTIC_RESTART = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Without it, gloo ranks that torchrun restarts connect to the addresses of dead processes."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--name",
        help="the job's name, to which its id adds 8 hexadecimal digits (default: the script's, or its file name)",
    )
    parser.add_argument("--job", metavar="ID", help="the whole id of the job, for jobs on several nodes")
    parser.add_argument("--policy", help="a policy that replaces the script's")
    parser.add_argument(
        "torchrun", nargs="*", metavar="-- ARGUMENT", help="torchrun's options, the script, and its arguments"
    )


def run(arguments: argparse.Namespace) -> int:
    """Replace this process by torchrun; returns only when that fails."""
    words = torchrun_words(arguments)
    bus = find(os.environ)
    given = arguments.job or os.environ.get(JOB, "")
    named = identity(words, name=permitted(given, arguments.name, bus), given=given)
    what, watched = ("job", named[JOB]) if JOB in named else ("run", named[RUN_ID])
    print(
        f"{what} {watched}, bus {redact_url(bus.url)}; watch it with: dynamix top {watched}",
        file=sys.stderr,
        flush=True,
    )
    command = [sys.executable, "-m", "torch.distributed.run", *words]
    os.execve(sys.executable, command, environment(os.environ, named, bus, arguments.policy))  # noqa: S606 - no shell


def torchrun_words(arguments: argparse.Namespace) -> list[str]:
    """The words for torchrun. Raises CommandError where there are none, or no PyTorch."""
    words: list[str] = arguments.torchrun
    if not words:
        raise MisuseError("no script: put torchrun's options, the script and its arguments behind --")
    if importlib.util.find_spec("torch") is None:
        raise CommandError(
            f"PyTorch is not installed in the environment of {sys.executable}: install it there, by "
            f"`{sys.executable} -m pip install torch` (https://pytorch.org says which build fits your GPU)"
        )
    return words


def permitted(given: str, name: str | None, bus: BusSettings) -> str | None:
    """The job's name as given; without one and without an id, the only one that our credential is for.

    Raises:
        CommandError: when the credential is for other names, or the settings of the bus cannot be used: the ranks would
            train without steering, and say so among much else.
    """
    with explained(ValueError):
        check_bus(bus)
        key = credential_in(bus)
        asked = subjects.name_and_run(given)[0] if given else name
    names = key.limited_to("job") if key else []
    if asked is None and len(names) == 1:
        return names[0]
    if not names or asked in names:
        return name
    raise MisuseError(f"{bus.creds_file} is for jobs named {', '.join(names)} only: pass one of them with --name")


def identity(arguments: Sequence[str], *, name: str | None, given: str) -> dict[str, str]:
    """The variables that name the job: its id as given, or the name and a random run id.

    Where neither an id nor a name is given, the script may name the job: then only the run id is decided here.

    Raises:
        CommandError: when it is invalid in a subject, or when each of several nodes would make a different one.
    """
    try:
        if given:
            return {JOB: check_token(given)}
        script = next((argument for argument in arguments if argument.endswith(".py")), "job")
        of_script = re.sub(r"[^a-z0-9]+", "-", Path(script).stem.lower()).strip("-")[:MAX_NAME]
        chosen = check_token(name or of_script or "job")
    except ValueError as error:
        raise MisuseError(str(error)) from error
    if len(chosen) > MAX_NAME:
        raise MisuseError(f"the name {chosen!r} has {len(chosen)} characters: use at most {MAX_NAME}")
    run_id = new_run_id()
    made = f"{chosen}-{run_id}"
    own = itertools.takewhile(lambda argument: not argument.endswith(".py"), arguments)
    nodes = re.search(r"(?:^|\s)--nnodes[=\s](\S+)", " ".join(own))
    if nodes is not None and nodes[1] not in ("1", "1:1"):
        what = "a job on several nodes needs one id on all of them: pass, for example,"
        raise MisuseError(f"{what} --job {made} on each")
    return {JOB: made} if name else {NAME: chosen, RUN_ID: run_id}


def environment(
    environ: Mapping[str, str], named: Mapping[str, str], bus: BusSettings, policy: str | None
) -> dict[str, str]:
    """The environment of torchrun: ours, the bus, the job, and what torchrun needs to restart ranks under gloo."""
    defaults = {ELASTIC_RESTART: "1", "OMP_NUM_THREADS": "1"}
    chosen = {"DYNAMIX_TRAINER_POLICY": policy} if policy else {}
    return defaults | dict(environ) | bus_environment(bus) | dict(named) | chosen
