"""The server of ``verl view``: the page, its scripts, and what it asks for, as JSON, on the loopback interface.

Every answer needs the token that the address printed at the start has; the browser keeps it as a cookie. The name in
the request's Host header must be one of this machine's loopback, so that no page elsewhere can reach the server by a
name of its own. Of a run's folder nothing is served as a file but the traces and profiles that the page lists, to be
saved.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from aiohttp import web

from verl.view.page import SCRIPTS, STATIC, STYLE, View, finite, plotly_script, served

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
COOKIE = "verl_view"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src "
    "'self'; img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""``style-src 'unsafe-inline'`` is for the styles that plotly sets; no text of a run is ever markup."""

VIEW: web.AppKey[View] = web.AppKey("view", View)
POOL: web.AppKey[ThreadPoolExecutor] = web.AppKey("pool", ThreadPoolExecutor)


def application(view: View, token: str) -> web.Application:
    """Return the server's routes, which answer to those who know ``token``."""

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            response = await _checked(token, request, handler)
        except web.HTTPException as error:
            response = web.Response(status=error.status, text=error.text)
        response.headers.update(HEADERS)
        return response

    app = web.Application(middlewares=[guarded])
    app[VIEW] = view
    app[POOL] = ThreadPoolExecutor(1)  # one reads, so that no run is read twice at once
    app.router.add_get("/", _page)
    app.router.add_get("/static/{name}", _static)
    app.router.add_get("/api/file", _file)
    for name in ("state", "curves", "config", "samples", "sample", "search"):
        app.router.add_get(f"/api/{name}", partial(_answer, _ROUTES[name]))

    async def close(app: web.Application) -> None:
        app[POOL].shutdown(wait=False, cancel_futures=True)

    app.on_cleanup.append(close)
    return app


async def _checked(token: str, request: web.Request, handler: Handler) -> web.StreamResponse:
    host = request.host.rpartition(":")[0] if not request.host.endswith("]") and ":" in request.host else request.host
    if host not in ("localhost", "127.0.0.1", "[::1]"):
        return web.Response(status=421, text="This server is for the loopback interface: open http://127.0.0.1:PORT/.")
    given = request.query.get("token")
    if given is not None and request.path == "/":
        if not hmac.compare_digest(given.encode(), token.encode()):
            return web.Response(status=403, text="This is not the token that verl view printed.")
        response: web.StreamResponse = web.Response(status=303, headers={"Location": "/"})
        response.set_cookie(_cookie(request), token, httponly=True, samesite="Strict")
        return response
    if not hmac.compare_digest(request.cookies.get(_cookie(request), "").encode(), token.encode()):
        return web.Response(status=403, text="Open the address that verl view printed: it has a token.")
    return await handler(request)


def _cookie(request: web.Request) -> str:
    """Cookies do not know ports: two servers would replace each other's."""
    return f"{COOKIE}_{request.host.rpartition(':')[2]}"


async def _page(request: web.Request) -> web.Response:
    return web.Response(text=served(), content_type="text/html")


async def _static(request: web.Request) -> web.StreamResponse:
    name = request.match_info["name"]
    charts = plotly_script()
    if name == "plotly.js" and charts is not None:
        return web.FileResponse(charts, headers={"Content-Type": "text/javascript; charset=utf-8"})
    if name in (STYLE, *SCRIPTS):
        kind = "text/css" if name == STYLE else "text/javascript"
        return web.Response(text=(STATIC / name).read_text(encoding="utf-8"), content_type=kind, charset="utf-8")
    raise web.HTTPNotFound(text="There is no such file.")


async def _answer(work: Callable[[View, Callable[[str], int], web.Request], Any], request: web.Request) -> web.Response:
    view = request.app[VIEW]

    def number(name: str) -> int:
        text = request.query.get(name, "0")
        if not text.isdecimal() or name == "run" and int(text) >= len(view.runs):
            raise web.HTTPBadRequest(text=f"{name}={text!r} is not a number of one there is.")
        return int(text)

    call = partial(work, view, number, request)
    try:
        found = await asyncio.get_running_loop().run_in_executor(request.app[POOL], call)
    except (IndexError, ValueError, OSError) as error:
        raise web.HTTPNotFound(text=str(error)) from None
    response = web.json_response(finite(found))
    response.enable_compression()
    return response


async def _file(request: web.Request) -> web.StreamResponse:
    """A trace or profile of a run, by the name that the page lists."""
    runs, number, name = request.app[VIEW].runs, request.query.get("run", ""), request.query.get("name", "")
    if not number.isdecimal() or int(number) >= len(runs) or name not in runs[int(number)].traces():
        raise web.HTTPNotFound(text="There is no such trace.")
    headers = {"Content-Disposition": "attachment", "Content-Type": "application/octet-stream"}
    return web.FileResponse(runs[int(number)].folder / name, headers=headers)


_ROUTES: dict[str, Callable[[View, Callable[[str], int], web.Request], Any]] = {
    "state": lambda view, number, request: view.state(),
    "curves": lambda view, number, request: view.curves(request.query.getall("name", [])),
    "config": lambda view, number, request: view.config(),
    "samples": lambda view, number, request: view.rows(number("run"), number("first")),
    "sample": lambda view, number, request: view.sample(number("run"), number("number")),
    "search": lambda view, number, request: view.samples[number("run")].search(request.query.get("text", "")),
}


async def serve(view: View, host: str, ports: Sequence[int], token: str, opens_browser: bool = False) -> None:
    """Serve until cancelled, on the first of ``ports`` that is free; print the page's address.

    Raises:
        OSError: none is free.
    """
    runner = web.AppRunner(application(view, token), access_log=None)
    await runner.setup()
    try:
        for place, port in enumerate(ports):
            try:
                await web.TCPSite(runner, host, port).start()
                break
            except OSError:
                if place == len(ports) - 1:
                    raise
        port = runner.addresses[0][1]
        shown = f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{port}/?token={token}"
        count = len(view.runs)
        print(f"{count} run{'s' * (count != 1)}: {address}\nCtrl-C ends it.", flush=True)
        if opens_browser:
            import webbrowser

            webbrowser.open(address)
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()
