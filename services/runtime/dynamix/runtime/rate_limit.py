"""Lets so many events of a key pass per second, and counts the rest."""

import time

_MAX_KEYS = 1024


class RateLimit:
    """Lets `burst` events of a key through, then `per_s` per second; counts the others."""

    def __init__(self, per_s: float, burst: int = 1) -> None:
        self._per_s = per_s
        self._burst = burst
        self._tokens: dict[str, tuple[float, float]] = {}
        self._suppressed: dict[str, int] = {}

    def allow(self, key: str) -> bool:
        """Whether this event is within the rate."""
        now = time.monotonic()
        if len(self._tokens) >= _MAX_KEYS and key not in self._tokens:
            self._tokens.clear()
            self._suppressed.clear()
        tokens, since = self._tokens.get(key, (float(self._burst), now))
        tokens = min(self._burst, tokens + (now - since) * self._per_s)
        allowed = tokens >= 1
        self._tokens[key] = (tokens - allowed, now)
        if not allowed:
            self._suppressed[key] = self._suppressed.get(key, 0) + 1
        return allowed

    def suppressed(self, key: str) -> int:
        """Number of suppressed events of the key since the last call."""
        return self._suppressed.pop(key, 0)
