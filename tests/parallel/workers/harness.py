"""The registry of cases: ``@case(2, 3)`` runs a function with 2 and with 3 ranks."""

from __future__ import annotations

from collections.abc import Callable

#: Every case of the modules imported so far, in the order of their definition.
CASES: dict[str, Callable[[], None]] = {}


def case(*ranks: int) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register a case; ``ranks`` are read by ``conftest.py``, which decides what is launched."""
    del ranks

    def register(function: Callable[[], None]) -> Callable[[], None]:
        if function.__name__ in CASES:
            raise ValueError(f"two cases are called {function.__name__}")
        CASES[function.__name__] = function
        return function

    return register
