"""Arguments that can't be meant as they are given: each answered by what to write instead, in every framework alike."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar, cast

from horovod.common.process_sets import ProcessSet

from hvd_lhc.errors import ConfigError

__all__ = ["ChoiceOfCompressors", "check_process_set", "describe", "method_of_an_instance", "options_by_name"]

_Init = TypeVar("_Init", bound=Callable[..., None])


def options_by_name(init: _Init) -> _Init:
    """Decorates an ``__init__`` that takes keyword arguments only: others raise ``ConfigError``, with the options that are."""
    signature = inspect.signature(init)
    options = list(signature.parameters)[1:]

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        if args:
            given = ", ".join(map(repr, args))
            raise ConfigError(f"LHC takes options by name, as in LHC({options[0]}=...), not LHC({given}). {_known(options)}")
        for name in kwargs:
            if name not in options:
                close = difflib.get_close_matches(name, options, 1)
                meant = f" Did you mean {close[0]}?" if close else ""
                raise ConfigError(f"LHC has no option {name!r}.{meant} {_known(options)}")
        init(self, *args, **kwargs)

    return cast("_Init", checked)


def _known(options: list[str]) -> str:
    return f"Its options are {', '.join(options[:-1])} and {options[-1]}; none of them has to be given."


def check_process_set(process_set: Any) -> None:
    """Raise unless the argument is what Horovod calls a process set, or ``None`` for all ranks.

    Raises:
        ConfigError: it isn't.
    """
    if process_set is not None and not isinstance(process_set, ProcessSet):
        raise ConfigError(
            f"process_set must be a hvd.ProcessSet, the same object as Horovod is given, not {process_set!r}: "
            "write ranks = hvd.ProcessSet([0, 1]), hvd.init(process_sets=[ranks]) and LHC(process_set=ranks)"
        )


def describe(what: Any) -> str:
    """What was given where a tensor was asked for, in a few words."""
    kind = type(what)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__.partition('.')[0]}.{kind.__name__}"
    return f"an object of type {name}"


class method_of_an_instance:
    """Decorates a method that Horovod calls on what it was given as ``compression=``; on the class: ``ConfigError``."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        functools.update_wrapper(self, method)  # type: ignore[arg-type]

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is not None:
            return self._method.__get__(instance, owner)

        @functools.wraps(self._method)
        def of_the_class(*args: Any, **kwargs: Any) -> Any:
            if args and isinstance(args[0], owner):  # as a subclass calls it
                return self._method(*args, **kwargs)
            raise ConfigError(
                f"compression={owner.__name__} gives Horovod a class: write compression={owner.__name__}(), with parentheses, "
                "or compression=Compression.lhc"
            )

        return of_the_class


class ChoiceOfCompressors:
    """A class whose attributes are compressors, and which is none itself."""

    @staticmethod
    def compress(*args: Any, **kwargs: Any) -> NoReturn:
        """Raise ``ConfigError``: Horovod was given the whole choice."""
        _refuse_choice()

    @staticmethod
    def decompress(*args: Any, **kwargs: Any) -> NoReturn:
        """Raise ``ConfigError``: Horovod was given the whole choice."""
        _refuse_choice()


def _refuse_choice() -> NoReturn:
    raise ConfigError(
        "compression=Compression gives Horovod all compressors to choose from: write compression=Compression.lhc "
        "(or Compression.none, Compression.fp16)"
    )
