"""Extensions: policies, loggers and codecs of other packages, registered as entry points and loaded by name.

A package registers an object in its `pyproject.toml`, and is installed where the name is used (a policy: beside the
arbitrator). A class is called without arguments; any other object is taken as it is.

    [project.entry-points."dynamix.policies"]
    their-policy = "their_package.policy:TheirPolicy"

Names of DYNAMIX itself are looked up first by the callers and cannot be replaced; a name that two packages register is
refused. Nothing is imported before its name is asked for, so that a broken package disturbs only jobs that name it.
"""

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal, TypeVar

Group = Literal["dynamix.policies", "dynamix.loggers", "dynamix.codecs"]
T = TypeVar("T")


class ExtensionError(ValueError):
    """An extension that cannot be used; the message names its package and entry point, the reason and the fix."""


def extension_names(group: Group) -> list[str]:
    """The names that installed packages register in a group, sorted; nothing is imported."""
    return sorted({entry.name for entry in entry_points(group=group)})


def load_extension(group: Group, name: str, check: Callable[[Any], T]) -> T | None:
    """The object that is registered under a name; `None` when no package registers it.

    `check` returns the object, now of a known type, or raises TypeError or ValueError saying what it lacks.

    Raises:
        ExtensionError: when two packages register the name, or the object cannot be imported, made or used.
    """
    found = list(entry_points(group=group, name=name))
    if not found:
        return None
    if len(found) > 1:
        packages = ", ".join(sorted(map(_package, found)))
        raise ExtensionError(f"{name!r} in {group!r} is registered by {packages}: uninstall all but one of them")
    (entry,) = found
    try:
        target = entry.load()
        return check(target() if isinstance(target, type) else target)
    except (Exception, SystemExit) as error:
        raise ExtensionError(
            f"{_package(entry)} registers {name!r} in {group!r} as {entry.value!r}, which cannot be used: "
            f"{type(error).__name__}: {error}; fix the package or uninstall it"
        ) from error


def _package(entry: EntryPoint) -> str:
    return "a package without metadata" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
