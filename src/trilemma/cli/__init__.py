"""The `trilemma` command.

Exit codes: 0 done; 1 a defect in Trilemma; 2 bad input, with a message that says what is allowed; 130 stopped
by Ctrl-C, with what was finished saved.
"""

from __future__ import annotations

import sys

from rich.console import Console

from trilemma.cli.app import app
from trilemma.errors import UserError


def main() -> None:
    """Run the command line; turn a user's mistake into its message and exit code 2."""
    try:
        app()
    except UserError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {_escape(str(error))}", highlight=False)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _escape(text: str) -> str:
    """Keep rich from reading [tables] in a message as markup."""
    return text.replace("[", "\\[")


__all__ = ["app", "main"]
