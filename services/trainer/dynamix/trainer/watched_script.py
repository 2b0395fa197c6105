"""Runs a training script under torchrun with its ranks watched: the file that torchrun starts by its path.

Nothing here may import torch before the script does, which may set variables that torch reads.
"""

import builtins
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def watch_after_torch(path: str) -> None:
    """Begin to watch once the script has imported torch."""
    plain = builtins.__import__

    def importing(*arguments: Any, **options: Any) -> Any:
        module = plain(*arguments, **options)
        torch = sys.modules.get("torch")
        if torch is not None and not getattr(torch.__spec__, "_initializing", False):
            builtins.__import__ = plain
            from dynamix.trainer.watch import begin  # noqa: PLC0415 - imports torch

            begin(path)
        return module

    builtins.__import__ = importing


def run_script(words: Sequence[str]) -> None:
    """Run `script arguments`, or `-m module arguments`, as Python itself would."""
    is_module, script = words[0] == "-m", Path(words[0]).absolute()
    if not sys.flags.safe_path:
        sys.path[0] = str(Path.cwd()) if is_module else str(script.resolve().parent)
    sys.argv = list(words[is_module:])
    if is_module:
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(str(script), run_name="__main__")


def launch(path: str, words: Sequence[str]) -> None:
    """Be torchrun, which starts this file in each rank, and that the script."""
    from torch.distributed import run  # noqa: PLC0415 - in torchrun's own process
    from torch.distributed.elastic.multiprocessing.errors import record  # noqa: PLC0415

    sys.argv[0] = "torchrun"  # its name in messages
    options = run.parse_args(list(words))  # type: ignore[no-untyped-call]
    if options.no_python:
        raise SystemExit("dynamix watch: --no-python starts another program than Python, which cannot be watched")
    script = [*(["-m"] if options.module else []), options.training_script, *options.training_script_args]
    options.module = options.run_path = False
    options.training_script, options.training_script_args = __file__, ["rank", path, *script]
    record(run.run)(options)


def main(words: Sequence[str]) -> None:
    """`launch SOCKET` and torchrun's words; or, in each rank, `rank SOCKET`, the script and its words."""
    act, path, *rest = words
    if act == "launch":
        launch(path, rest)
    else:
        watch_after_torch(path)
        run_script(rest)


if __name__ == "__main__":
    main(sys.argv[1:])
