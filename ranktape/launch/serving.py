"""Gives `ranktape serve`: the report's page of a run in a browser, while the run is recorded."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ranktape.analyze.command import describe
from ranktape.analyze.console import say
from ranktape.analyze.options import Selection
from ranktape.errors import expect_least
from ranktape.launch.place import shown

if TYPE_CHECKING:
    from ranktape.analyze.engine.engine import Engine
    from ranktape.analyze.engine.values import View

_SHORTEST_SECONDS = 0.05
"""From one look to the next: each costs the store some requests."""


def serve(
    run: str,
    *,
    filters: Mapping[str, Sequence[str]] | None = None,
    where: str | None = None,
    format: Sequence[str] = (),  # noqa: A002 - the option's name
    host: str = "127.0.0.1",
    port: int = 0,
    interval: float = 2.0,
    view: View | None = None,
    engine: Engine | None = None,
    storage_options: Mapping[str, Any] | None = None,
    on_ready: Callable[[str], object] = lambda _: None,
) -> None:
    """Show the report's page of RUN in a browser while it is recorded, and print its address.

    The page is built anew when an iteration is complete, and shows it by itself. Whoever has the address, which holds
    a token, may read the page, from this machine alone; from another one, 'ssh -L PORT:127.0.0.1:PORT' brings it. It
    ends with Ctrl-C.

    Args:
        format (NAME): Formats that are tried on every record; repeatable.  [default: mxfp8_e4m3, mxfp4_e2m1, fp8_e4m3,
            hif8]
        host (ADDRESS): Of this machine, where the page is served.
        port (N): Where the page is served; 0 takes a free one.
        interval (SECONDS): From one look at the run to the next.
        on_ready: Called with the address of the page, when it answers.

    Raises:
        NoRecordsError: iterations are complete, and nothing in them matches the filters.
        RunNotFoundError: there is no run.
        StorageError: the store cannot be read.
        UsageError: a filter, a format, the host, the port or the interval is not allowed.
    """
    from ranktape.analyze.views.report.live import LivePage
    from ranktape.analyze.views.report.page import policy
    from ranktape.launch.page_server import ServedPage, serving  # imports a server, which takes other commands 25 ms
    from ranktape.storage.maintenance.runs import suggest_nearest

    expect_least(_SHORTEST_SECONDS, interval=interval)
    chosen = {field: tuple(texts) for field, texts in (filters or {}).items()}
    selection = Selection(run=run, filters=chosen, where=where, storage_options=storage_options)
    with suggest_nearest(run, storage_options=storage_options):
        page = LivePage(selection, format=format, view=view, interval=interval, engine=engine)
    allowed = policy(is_live=True)
    pages = {
        "": lambda: ServedPage(content=page.content, media_type="text/html; charset=utf-8", policy=allowed),
        "state": lambda: ServedPage(content=json.dumps(page.state).encode("ascii"), media_type="application/json"),
    }
    with contextlib.suppress(KeyboardInterrupt), serving(host, port, pages=pages) as server:
        page.check()
        on_ready(server.url)
        while True:
            time.sleep(interval)
            page.look()


def _serve(selection: Selection, **given: Any) -> None:
    def tell(address: str) -> None:
        say(address)
        place = shown(selection.run)
        say(f"follows {place} while it is recorded; whoever has this address may read it; Ctrl-C ends it", err=True)

    serve(
        selection.run,
        filters=selection.filters,
        where=selection.where,
        storage_options=selection.storage_options,
        on_ready=tell,
        **given,
    )


command = describe(__name__, "serve").command(_serve)
