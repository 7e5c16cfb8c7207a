"""``python -m hvd_lhc COMMAND``.

A command is a module with ``add_arguments(parser)`` and ``run(arguments) -> int``; to add one, add a line to ``COMMANDS``.
It is imported when it is called for, so that installing Horovod needs no kernel and no framework.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from hvd_lhc import __version__
from hvd_lhc.errors import LHCError

#: Command -> its module, and one line of help.
COMMANDS: dict[str, tuple[str, str]] = {
    "install-horovod": (
        "hvd_lhc.install_horovod",
        "build the released Horovod for the torch and TensorFlow of this environment, and install it",
    ),
}


def make_parser(chosen: str | None) -> argparse.ArgumentParser:
    """The parser: all commands by name, the options of the chosen one only."""
    parser = argparse.ArgumentParser(prog="python -m hvd_lhc", description="Tools of hvd_lhc.")
    parser.add_argument("--version", action="version", version=f"hvd_lhc {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module_name, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if name == chosen:
            importlib.import_module(module_name).add_arguments(command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status (1 after one of our own errors, 130 after Ctrl-C)."""
    words = list(sys.argv[1:] if argv is None else argv)
    chosen = next((word for word in words if word in COMMANDS), None)
    arguments = make_parser(chosen).parse_args(words)
    try:
        return int(importlib.import_module(COMMANDS[arguments.command][0]).run(arguments))
    except LHCError as error:
        print(f"{arguments.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{arguments.command}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
