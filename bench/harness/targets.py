"""Targets: a figure, the limit that was promised for it, and whether the figure keeps it."""

from typing import Any

import msgspec


class Target(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One figure with its limit; exactly one of the two limits is given. A figure that is unknown or NaN misses it."""

    name: str
    value: float | None
    at_most: float | None = None
    at_least: float | None = None

    @property
    def met(self) -> bool:
        """Whether the figure keeps the limit."""
        if self.value is None:
            return False
        return self.value <= self.at_most if self.at_most is not None else self.value >= (self.at_least or 0.0)

    @property
    def verdict(self) -> str:
        """The limit and whether it is met, to stand beside the figure."""
        sign, limit = ("<=", self.at_most) if self.at_most is not None else (">=", self.at_least)
        return f"{sign} {limit:g} {'met' if self.met else 'MISSED'}"

    def as_json(self) -> dict[str, Any]:
        """The target as `--json` writes it."""
        return {**msgspec.to_builtins(self), "met": self.met}

    def __str__(self) -> str:
        return f"{self.name}: {'-' if self.value is None else f'{self.value:,.4g}'}, target {self.verdict}"
