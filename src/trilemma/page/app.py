"""The page's addresses. Each answers from what the index has found; none writes, none takes a path."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import FastAPI, HTTPException, Query, Request
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from starlette.types import ASGIApp

from trilemma import __version__
from trilemma.base.errors import UserError
from trilemma.base.files import readable
from trilemma.page import federations, planner, runs, studies
from trilemma.page.answers import (
    Differences,
    PartyLine,
    PartyView,
    ProblemText,
    RunLine,
    RunList,
    RunView,
    StudyLine,
    StudyView,
    TrustMap,
)
from trilemma.page.guard import Guard
from trilemma.page.index import Index, WatchedRun
from trilemma.page.plan_answers import Choices, PlanAnswer, PlanCurves, PlanQuestion, PlanSeconds
from trilemma.page.trust import trust_map
from trilemma.report.run_metadata import BASELINE, RunMetadata, simulated_records

STATIC = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
"""What the page is made of."""

PAUSE = 1.0
"""Seconds between two looks at the folders while somebody watches."""

Sort = Literal["run", "state", "rule", "liars", "rounds", "score", "ε", "changed"]
"""By what runs are put in order."""

PLACES: dict[Sort, Callable[[RunLine], Any]] = {
    "run": lambda line: line.title.lower(),
    "state": lambda line: line.state,
    "rule": lambda line: line.rule or None,
    "liars": lambda line: line.byzantine if line.clients else None,
    "rounds": lambda line: line.done if line.rounds else None,
    "score": lambda line: line.mean,
    "ε": lambda line: line.guarantee and line.guarantee.epsilon,
    "changed": lambda line: line.changed or None,
}
"""Where a run stands in such an order; None: after all others."""

PROBLEMS: dict[int | str, dict[str, Any]] = {
    400: {"model": ProblemText, "description": "The question is impossible; the text says why."},
    403: {"description": "Without the token, or under another name."},
    404: {"model": ProblemText, "description": "There is no such thing among what is watched."},
}
"""What may go wrong, for the description of the page's addresses."""


def make_app(index: Index, token: str, hosts: frozenset[str], cookie: str = "trilemma") -> ASGIApp:
    """Return the page as an application behind its guard."""
    return Guard(make_inner(index), token, hosts, cookie)


def make_inner(index: Index) -> FastAPI:
    """Return the page's addresses, unguarded."""
    app = FastAPI(title="Trilemma", version=__version__, docs_url=None, redoc_url=None, responses=PROBLEMS)
    _add_pages(app)
    _add_runs(app, index)
    _add_planner(app)
    _add_others(app, index)

    @app.exception_handler(UserError)
    def refused(_: Request, error: UserError) -> JSONResponse:
        return JSONResponse(ProblemText(detail=str(error)).model_dump(), 400)

    return app


def _add_pages(app: FastAPI) -> None:
    own = {one.name: one for one in Path(str(files("trilemma.page") / "static")).iterdir() if one.is_file()}

    def page() -> FileResponse:
        return FileResponse(own["index.html"], media_type="text/html")

    def plotly() -> FileResponse:
        script = Path(str(files("plotly") / "package_data" / "plotly.min.js"))
        return FileResponse(script, media_type="text/javascript", headers={"Cache-Control": "max-age=86400"})

    def part(name: str) -> FileResponse:
        if name not in own:
            raise HTTPException(404, "there is no such part of the page")
        return FileResponse(own[name], media_type=STATIC[name.rpartition(".")[2]])

    for address, answer in (("/", page), ("/plotly.js", plotly), ("/static/{name}", part)):
        app.add_api_route(address, answer, include_in_schema=False, response_model=None)


def _add_runs(app: FastAPI, index: Index) -> None:
    @app.get("/api/runs")
    def list_runs(
        search: Annotated[str, Query(max_length=200)] = "",
        offset: Annotated[int, Query(ge=0, le=1_000_000)] = 0,
        limit: Annotated[int, Query(ge=1, le=500)] = 100,
        sort: Sort = "changed",
        down: bool = True,
    ) -> RunList:
        """Return runs, those that changed last first; each word of the search stands somewhere in a line."""
        words = search.lower().split()
        everything = [_line(index, one) for one in index.all("run", "deployed")]
        matching = [line for line in everything if all(word in _text(line) for word in words)]
        told = [line for line in matching if PLACES[sort](line) is not None]
        silent = [line for line in matching if PLACES[sort](line) is None]
        matching = [*sorted(told, key=PLACES[sort], reverse=down), *silent]
        return RunList(
            runs=matching[offset : offset + limit],
            total=len(matching),
            watched=index.names,
            version=index.version,
        )

    @app.get("/api/runs/{run}")
    def one_run(run: str) -> RunView:
        """Return a run's configuration, curves and guarantee."""
        one, found = _must(index, run)
        with readable(one.folder):
            baseline = None
            if one.kind == "run" and (one.folder / BASELINE / "config.toml").is_file():
                baseline = simulated_records(found.config, one.folder / BASELINE)
            return runs.view_of(runs.line_of(one, found), found, index.records(one), baseline)

    @app.get("/api/runs/{run}/trust")
    def trust(run: str, seed: int | None = None) -> TrustMap:
        """Return every client's share in the aggregate, clients × rounds, of one seed or the mean."""
        one, found = _must(index, run)
        with readable(one.folder):
            seeds = index.records(one)
            if seed is not None and seed not in seeds:
                raise UserError(f"there is no seed {seed}; allowed: {', '.join(map(str, seeds))}")
            return trust_map(found, seeds, seed)

    @app.get("/api/differences")
    def differences(run: Annotated[list[str], Query(min_length=1, max_length=20)]) -> Differences:
        """Return what tells the configurations of some runs apart."""
        pairs = [_must(index, id_) for id_ in run]
        return runs.differences([(one.title, found.config) for one, found in pairs])


def _line(index: Index, one: WatchedRun) -> RunLine:
    found = index.metadata(one)
    try:
        with readable(one.folder):
            return runs.line_of(one, found)
    except UserError as error:
        return runs.line_of(one, error)


def _text(line: RunLine) -> str:
    """Return what a search looks through."""
    return " ".join(
        (line.name, line.title, line.state, line.data, line.algorithm, line.rule, line.attack, line.threat)
    ).lower()


def _must(index: Index, run: str) -> tuple[WatchedRun, RunMetadata]:
    one = index.get(run, "run", "deployed")
    if one is None:
        raise HTTPException(404, "there is no such run among what is watched")
    found = index.metadata(one)
    if isinstance(found, UserError):
        raise found
    return one, found


def _add_planner(app: FastAPI) -> None:
    @app.get("/api/choices")
    def choices() -> Choices:
        """Return what the planner's controls offer."""
        return planner.choices()

    @app.get("/api/plan")
    def plan(asked: Annotated[PlanQuestion, Query()]) -> PlanAnswer:
        """Return what noise guarantees, or which noise a guarantee needs: `trilemma privacy`."""
        return planner.plan(asked.question(), asked.rule)

    @app.get("/api/plan/curves")
    def plan_curves(asked: Annotated[PlanQuestion, Query()]) -> PlanCurves:
        """Return ε over rounds and over the noise, and the noise over the number of clients."""
        return planner.plan_curves(asked.question())

    @app.get("/api/plan/seconds")
    def plan_seconds(asked: Annotated[PlanQuestion, Query()]) -> PlanSeconds:
        """Return what a round takes on this machine: the rule, and a client's noise."""
        return planner.plan_seconds(asked.question(), asked.rule)


def _add_others(app: FastAPI, index: Index) -> None:
    @app.get("/api/studies")
    def list_studies() -> list[StudyLine]:
        """Return the folders that hold more than one run."""
        return studies.lines(index)

    @app.get("/api/study")
    def study(
        name: Annotated[str, Query(max_length=1000)],
        row: Annotated[str, Query(max_length=200)] = "",
        column: Annotated[str, Query(max_length=200)] = "",
        score: Annotated[str, Query(max_length=200)] = "",
    ) -> StudyView:
        """Return a study as a table."""
        found = studies.view(index, name, row, column, score)
        if found is None:
            raise HTTPException(404, "there is no such study among what is watched")
        return found

    @app.get("/api/parties")
    def parties() -> list[PartyLine]:
        """Return the parties of federations whose folders are watched."""
        return [federations.party_line(one) for one in index.all("party")]

    @app.get("/api/parties/{party}")
    def one_party(party: str) -> PartyView:
        """Return what a party's own folder tells its owner."""
        one = index.get(party, "party")
        if one is None:
            raise HTTPException(404, "there is no such party among what is watched")
        return federations.party_view(one, index)

    @app.get("/api/events", include_in_schema=False, response_model=None)
    async def events(request: Request) -> StreamingResponse:
        """Tell the version of what is watched whenever it changes."""
        return StreamingResponse(_versions(index, request), media_type="text/event-stream")


async def _versions(index: Index, request: Request) -> AsyncIterator[str]:
    told = -1
    while not await request.is_disconnected():
        version = await asyncio.to_thread(index.fresh)
        yield f"data: {version}\n\n" if version != told else ": still here\n\n"
        told = version
        await asyncio.sleep(PAUSE)
