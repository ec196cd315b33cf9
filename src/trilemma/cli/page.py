"""`trilemma page`: look at runs, plans, studies and federations in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trilemma.base.errors import UserError


def page_command(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="folders of runs, sweeps and parties; default: runs")
    ] = None,
    host: Annotated[
        str, typer.Option(help="address to listen on; others can reach only an address that is not local")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port; 0: a free one", min=0, max=65535)] = 8765,
    open_: Annotated[bool, typer.Option("--open", help="also open it in this machine's browser")] = False,
) -> None:
    """Show runs, studies and federations in a browser.

    Shows runs as they grow, and a privacy planner. Writes nothing. The printed address holds a token, which
    every visitor needs. Ctrl-C stops the page.
    """
    try:
        import fastapi  # noqa: F401
        import plotly  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as missing:
        raise UserError(
            f"the page needs {missing.name}: in a checkout, pip install -c constraints.txt -e '.[page]'"
        ) from None

    from rich.console import Console

    from trilemma.page.serving import serve

    console = Console()
    watched = folders or [Path("runs")]

    def tell(address: str) -> None:
        console.print(address, highlight=False, markup=False, soft_wrap=True)
        console.print("Ctrl-C stops it", highlight=False)
        if open_:
            typer.launch(address)

    serve(watched, host, port, tell)
