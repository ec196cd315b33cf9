"""The `trilemma` command.

Exit codes: 0 done; 1 no result: every seed diverged, or a defect in Trilemma; 2 bad input, with a message
that says what is allowed, or a file that cannot be read or written; 130 stopped by Ctrl-C, with what was
finished saved.
"""

from __future__ import annotations

import sys

from trilemma.base.errors import UserError, printable
from trilemma.cli.app import app


def main() -> None:
    """Run the command line; turn a user's mistake, or a file that the system refuses, into a message."""
    try:
        app(prog_name="trilemma")
    except UserError as error:
        _say(str(error))
        sys.exit(2)
    except OSError as error:
        if error.filename is None:
            raise
        _say(f"{error.filename}: {error.strerror}")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _say(problem: str) -> None:
    from rich.console import Console
    from rich.markup import escape

    Console(stderr=True).print(f"[bold red]error:[/] {escape(printable(problem))}", highlight=False)


__all__ = ["app", "main"]
