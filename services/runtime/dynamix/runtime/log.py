"""Logs: structlog set up once per process, JSON unless stderr is a TTY, and never a password."""

import logging
import sys
from collections.abc import MutableMapping
from typing import Any, TextIO

import structlog

from .settings import redact_url

_SECRET_WORDS = ("password", "secret", "token", "credential")


def configure(level: str = "info", stream: TextIO | None = None) -> None:
    """Send the process's logs (structlog's and the standard library's alike) to `stream`, standard error by default.

    Services and the command line call it once; importing a module of ours never does.
    """
    stream = stream or sys.stderr
    shared: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    if stream.isatty():
        rendering: list[structlog.types.Processor] = [redact, structlog.dev.ConsoleRenderer()]
    else:
        rendering = [structlog.processors.format_exc_info, redact, structlog.processors.JSONRenderer()]
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def redact(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Replace secrets in an event: values of telling names, and what stands before the `@` of a URL."""
    for key, value in event.items():
        if any(word in key.lower() for word in _SECRET_WORDS):
            event[key] = "***"
        elif isinstance(value, str) and "@" in value:
            event[key] = redact_url(value)
    return event
