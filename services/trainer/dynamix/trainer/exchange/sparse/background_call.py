"""A call in the background: a function that runs while a collective is under way, in a thread of its own."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class BackgroundCall(Generic[T]):
    """What a function returns, or raises, once it is asked for; a context, at whose end the thread has ended."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._returned: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="dynamix exchange peeling", daemon=True)

    def __enter__(self) -> "BackgroundCall[T]":
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._thread.join()

    def result(self) -> T:
        """Wait for it. Raises what the function raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._returned[0]

    def _run(self) -> None:
        try:
            self._returned.append(self._work())
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            self._error = error
