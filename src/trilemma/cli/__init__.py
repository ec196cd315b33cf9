"""The `trilemma` command.

Exit codes: 0 done; 1 no result: every seed diverged, or a defect in Trilemma; 2 bad input, with a message
that says what is allowed; 130 stopped by Ctrl-C, with what was finished saved.
"""

from __future__ import annotations

import sys

from trilemma.cli.app import app
from trilemma.errors import UserError, printable


def main() -> None:
    """Run the command line; turn a user's mistake into its message and exit code 2."""
    try:
        app(prog_name="trilemma")
    except UserError as error:
        from rich.console import Console
        from rich.markup import escape

        Console(stderr=True).print(f"[bold red]error:[/] {escape(printable(str(error)))}", highlight=False)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


__all__ = ["app", "main"]
