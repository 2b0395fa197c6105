"""The frame of a service: `run(name, settings_type, main)` calls `main` with a `Context`."""

from .frame import EXIT_FAILED, EXIT_OK, EXIT_USAGE, Context, StartError, run

__all__ = ["EXIT_FAILED", "EXIT_OK", "EXIT_USAGE", "Context", "StartError", "run"]
