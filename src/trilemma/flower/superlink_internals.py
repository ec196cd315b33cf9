"""What is changed in the SuperLink of Flower 1.41, by parts of it that are not public.

`internals` says what else leans on such parts. What is used here, and why:

* **Threads** (`few_threads`): a SuperLink handles requests in forty threads, of which its database lets one
  write at a time and keeps five connections open; the others sleep, look again, and open connections of their
  own. Twenty clients that answer at the same time then wait for each other more than they work.
* **Connections** (`SILENT`): a SuperLink closes those that are silent for 5 s, and a client that waits would
  shake hands anew for every question.
* **Layers** (`take_the_short_way`): most of what a request costs is what it passes through before and after
  its handler; `short_way` leaves that out.
* **Tidying** (`tidy_now_and_then`): before every look at a run's state the database is written to, to end
  tasks that have expired, and all that write wait for it. Once a second is as good.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import anyio.to_thread
import uvicorn
from flwr.supercore.corestate.sql_corestate import SqlCoreState
from flwr.superlink.cli import flower_superlink

from trilemma.flower.short_logs import keep_short
from trilemma.flower.short_way import ShortWay, fleet, runtime

THREADS = 2
"""How many requests are handled at the same time; not one, so that a long one does not keep all waiting."""

SILENT = 75
"""Seconds of silence after which a connection is closed; the guard uses them again for less."""

TIDY = 1.0
"""Seconds between two looks for tasks that have expired."""


def run_superlink() -> None:
    """Run `flower-superlink`, with the changes below and its command line."""
    keep_short()
    few_threads(THREADS)
    take_the_short_way()  # after the threads: what is called last sees Flower's own app
    tidy_now_and_then(TIDY)
    flower_superlink()


def take_the_short_way() -> None:
    """Let a SuperLink answer what comes with every message without its layers of middleware.

    Nor does it look through all that it imported for what could be forgotten, again and again: a fifth of its
    time.
    """
    serving: Any = uvicorn
    honest = serving.run

    def run(app: Callable[..., Any], **options: Any) -> None:
        gc.freeze()
        honest(ShortWay(app, {**runtime("SuperLink"), **fleet()}), **options)

    serving.run = run


def few_threads(threads: int) -> None:
    """Let a SuperLink handle requests in so many threads, and keep silent connections for a while."""
    serving: Any = uvicorn
    honest = serving.run

    def run(app: Callable[..., Any], **options: Any) -> None:
        async def limited(scope: Any, receive: Any, send: Any) -> None:
            anyio.to_thread.current_default_thread_limiter().total_tokens = threads
            await app(scope, receive, send)

        honest(limited, **{**options, "timeout_keep_alive": SILENT})

    serving.run = run


def tidy_now_and_then(interval: float) -> None:
    """Let a SuperLink end tasks that have expired every `interval` seconds, not with every request."""
    honest, last = SqlCoreState._cleanup_expired_task_tokens, -interval

    def tidy(state: SqlCoreState) -> None:
        nonlocal last
        if time.monotonic() - last >= interval:
            last = time.monotonic()
            honest(state)

    SqlCoreState._cleanup_expired_task_tokens = tidy
