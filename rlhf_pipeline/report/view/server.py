"""The server of the pages: this machine only, and only for users with the key in the printed URL.

It reads runs and stores and never writes to them; notes are in a separate file.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, QueryParams
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from rlhf_pipeline.errors import DefinitionError, MissingKeyError, PipelineError
from rlhf_pipeline.exchange.exporter import export_store
from rlhf_pipeline.report.notes import Notes
from rlhf_pipeline.report.query import View
from rlhf_pipeline.report.view.answers import answer, exported, view_of
from trajectory_store import MissingRowError, StoreError

HOST: Final = "127.0.0.1"
STATIC: Final = Path(__file__).parent / "static"
_EXPORTS: Final = {"jsonl": "application/x-ndjson", "parquet": "application/vnd.apache.parquet"}
_TYPES = {".js": "text/javascript", ".css": "text/css"}
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_POLICY = (
    "default-src 'none'; script-src 'self' 'nonce-{nonce}'; style-src 'self'; img-src data:; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)


class Guard:
    """Accepts only requests from this server's own pages, or from users with the key.

    A page of another site reaches a loopback address too: by its own requests (Origin, Sec-Fetch-Site) or by a name
    that it lets point here (Host). On a shared machine any user reaches it, so a cookie is needed, which the key buys.
    """

    def __init__(self, app: ASGIApp, *, port: int, key: str) -> None:
        self._app = app
        self._hosts = {f"{name}:{port}" for name in (HOST, "localhost", "[::1]")}
        self._key = key
        self._cookie_name = f"rlhf_pipeline_view_{port}"
        self._cookie = secrets.token_urlsafe(32)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        response = self._refusal(scope)
        await (response or self._app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        foreign = origin is not None and origin not in {f"http://{host}" for host in self._hosts}
        if headers.get("host") not in self._hosts or foreign or site in ("cross-site", "same-site"):
            return PlainTextResponse(
                "This server accepts requests only from its own pages on this machine.\n", 403, _HEADERS
            )
        key = QueryParams(scope["query_string"]).get("key", "")
        if scope["path"] == "/" and key and _same(key, self._key):
            moved = RedirectResponse("/", 303, _HEADERS)
            moved.set_cookie(self._cookie_name, self._cookie, httponly=True, samesite="strict")
            return moved
        if not _same(Request(scope).cookies.get(self._cookie_name, ""), self._cookie):
            return PlainTextResponse(
                "Open the URL that `rlhf-pipeline view` printed: it contains the required key.\n", 403, _HEADERS
            )
        return None


def _same(presented: str, expected: str) -> bool:
    return hmac.compare_digest(presented.encode(), expected.encode())


def make_app(views: Sequence[View], *, port: int, key: str) -> ASGIApp:
    """Return the application."""
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    files = {
        path.name: path.read_bytes() for path in (*STATIC.iterdir(), *(STATIC / "vendor").iterdir()) if path.is_file()
    }
    lock = threading.Lock()  # a store is read by one thread at a time

    def index(_request: Request) -> Response:
        nonce = secrets.token_urlsafe(16)
        headers = {**_HEADERS, "Content-Security-Policy": _POLICY.format(nonce=nonce)}
        return Response(page.replace("{{nonce}}", nonce), 200, headers, "text/html")

    def static(request: Request) -> Response:
        name = request.path_params["name"]
        kind = _TYPES.get(Path(name).suffix)
        if name not in files or kind is None:
            return JSONResponse({"error": "there is no such file."}, 404, _HEADERS)
        return Response(files[name], 200, _HEADERS, kind)

    def ask(request: Request) -> Response:
        query = {name: request.query_params.getlist(name) for name in request.query_params}
        try:
            with lock:
                return JSONResponse(answer(views, request.path_params["path"], query), 200, _HEADERS)
        except (MissingKeyError, MissingRowError) as error:
            return JSONResponse({"error": str(error)}, 404, _HEADERS)
        except (PipelineError, StoreError) as error:
            return JSONResponse({"error": str(error)}, 400, _HEADERS)

    def export(request: Request) -> Response:
        """Write the rows of a page to a file that is sent with the answer; the store is read, never written."""
        query = {name: request.query_params.getlist(name) for name in request.query_params}
        kind, folder = request.path_params["kind"], tempfile.TemporaryDirectory(prefix="rlhf-export-")
        try:
            if kind not in _EXPORTS:
                raise MissingKeyError(f"there is no export format {kind[:20]}; the formats are {', '.join(_EXPORTS)}.")
            with lock:
                view, conditions = exported(views, request.path_params["run"], query)
            file = Path(folder.name) / f"trajectories.{kind}"
            export_store(str(view.stored.path), file, filters=conditions)
        except (PipelineError, StoreError) as error:
            folder.cleanup()
            is_missing = isinstance(error, (MissingKeyError, MissingRowError))
            return JSONResponse({"error": str(error)}, 404 if is_missing else 400, _HEADERS)
        return FileResponse(
            file, 200, _HEADERS, _EXPORTS[kind], filename=file.name, background=BackgroundTask(folder.cleanup)
        )

    def note(request: Request, body: bytes) -> Response:
        """Record a note in the file next to a run; the run and its store are read, never written."""
        try:
            with lock:
                view = view_of(views, request.path_params["run"])
                view.place_of_trajectory(request.path_params["row"])
                content: object = json.loads(body)
                if not isinstance(content, dict):
                    raise DefinitionError("a note must consist of text and a list of labels.")
                Notes(view.address).write(str(request.path_params["row"]), content)
        except (MissingKeyError, MissingRowError) as error:
            return JSONResponse({"error": str(error)}, 404, _HEADERS)
        except (PipelineError, StoreError, ValueError, OSError) as error:
            return JSONResponse({"error": str(error)}, 400, _HEADERS)
        return JSONResponse({}, 200, _HEADERS)

    async def noted(request: Request) -> Response:
        return await run_in_threadpool(note, request, await request.body())

    async def api(request: Request) -> Response:
        return await run_in_threadpool(ask, request)

    async def download(request: Request) -> Response:
        return await run_in_threadpool(export, request)

    routes = [
        Route("/", index),
        Route("/static/{name}", static),
        Route("/api/{path:path}", api),
        Route("/export/{run}.{kind}", download),
        Route("/notes/{run}/{row:int}", noted, methods=["POST"]),
    ]
    return Guard(Starlette(routes=routes), port=port, key=key)


def listen(port: int | None) -> socket.socket:
    """Return a socket on the loopback address: on a port, or on any free one."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port or 0))
        listener.listen()  # so that a browser that is quicker than the server waits
    except OSError:
        listener.close()
        raise
    return listener


def serve(views: Sequence[View], bound: socket.socket, key: str) -> None:
    """Answer requests until Ctrl-C."""
    app = make_app(views, port=bound.getsockname()[1], key=key)
    config = uvicorn.Config(app, log_level="warning", access_log=False, ws="none", lifespan="off", server_header=False)
    uvicorn.Server(config).run(sockets=[bound])
