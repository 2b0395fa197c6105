"""The frame of a service: `run(name, settings_type, main)` reads settings, connects, and calls `main` with a `Context`.

In come the environment, `--flags` and signals; out go a heartbeat, logs and the exit code. A service's own work is its
`main`; what all services do alike belongs here. `lifecycle` is the way of a process from start to exit code, `context`
what `main` gets.
"""

from .context import Context, StartError
from .lifecycle import EXIT_FAILED, EXIT_OK, EXIT_USAGE, run

__all__ = ["EXIT_FAILED", "EXIT_OK", "EXIT_USAGE", "Context", "StartError", "run"]
