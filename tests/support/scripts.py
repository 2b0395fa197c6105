"""Scripts as a user starts them, forked from this process, which has imported torch already."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

from .http_get import free_port
from .ranks import START, begin_fork


def run_script(
    script: str | Path, *arguments: str, cwd: Path, environ: Mapping[str, str] | None = None, num_ranks: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run a file, or a module by its name, as a program; or so many ranks of it, with what torchrun would tell them.

    `environ` is added to this process's environment. Of several ranks the largest exit code counts.
    """
    world = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with tempfile.TemporaryDirectory() as written:
        processes = []
        try:
            for rank in range(num_ranks or 1):
                told = {**world, "RANK": str(rank), "LOCAL_RANK": str(rank)} if num_ranks else {}
                settings = {**os.environ, **told, **(environ or {})}
                process = START.Process(target=_main, args=(script, arguments, cwd, settings, Path(written)))
                process.start()
                processes.append(process)
            for process in processes:
                process.join()
        finally:
            for process in processes:
                process.kill()
        codes = [abs(process.exitcode or 0) for process in processes]
        stdout, stderr = (Path(written, name).read_text() for name in ("stdout", "stderr"))
        return subprocess.CompletedProcess([str(script), *arguments], max(codes), stdout, stderr)


def _main(script: str | Path, arguments: tuple[str, ...], cwd: Path, environ: Mapping[str, str], written: Path) -> None:
    begin_fork(environ)
    os.chdir(cwd)
    sys.argv = [str(script), *arguments]
    for name, number in (("stdout", 1), ("stderr", 2)):
        file = (written / name).open("a", buffering=1)  # until the process ends
        os.dup2(file.fileno(), number)
        setattr(sys, name, file)
    by_path = isinstance(script, Path)
    spec = spec_from_file_location("__main__", script) if by_path else find_spec(script)
    module = module_from_spec(spec)
    module.__name__ = "__main__"
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module  # what processes of its own call it in their messages
    exec(spec.loader.get_code(spec.name), vars(module))
