"""Serve the page of Insights to requests from this machine that include the page's token."""

from __future__ import annotations

import errno
import json
import os
import secrets
import sys
import threading
import traceback
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from ..errors import CaptumSSMError, OptionError
from ..viz.html.page import asset
from .api import Api, encoded
from .page import SCRIPTS, STYLES, served_page

_LOOPBACK = "127.0.0.1"
#: The largest accepted request, in bytes.
_LARGEST_REQUEST = 2**20
#: Seconds after which an idle connection is closed.
_SILENCE = 30
#: Seconds between two checks whether the server should stop.
_PATIENCE = 0.1

#: Style sheets and scripts, by path; they contain no data and need no token.
_ASSETS = {f"/{name}": name for name in (*STYLES, *SCRIPTS)}
#: Content types by file suffix.
_KINDS = {"css": "text/css", "js": "text/javascript"}
_HTML = "text/html; charset=utf-8"
#: The HTTP method and the request's name in :class:`Api`, by path.
_QUESTIONS = {
    "/api/config": ("GET", "config"),
    "/api/examples": ("POST", "examples"),
    "/api/relevance": ("POST", "relevance"),
    "/api/messages": ("POST", "messages"),
    "/api/cut": ("POST", "cut"),
    "/api/flow": ("POST", "flow"),
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'"
)
_HEADERS = {
    "Content-Security-Policy": f"{_POLICY}; "
    "frame-ancestors 'self' http://127.0.0.1:* http://localhost:*",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",  # the address holds the token
    "X-Content-Type-Options": "nosniff",
}


class Server:
    """Serves the page in a daemon thread, which ends with the process."""

    def __init__(self, api: Api, port: int | None = None, debug: bool = False) -> None:
        api.debug = debug
        self._http = _open_server(api, port or 0, debug)
        self._thread = threading.Thread(
            target=self._http.serve_forever, args=(_PATIENCE,), name="insights", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """The number of the server's port."""
        return self._http.server_port

    @property
    def url(self) -> str:
        """The page's address, including its token."""
        return f"http://{_LOOPBACK}:{self.port}/?token={self._http.token}"

    def wait(self) -> None:
        """Block until the server has ended."""
        while self._thread.is_alive():
            self._thread.join(1)  # without a timeout, Ctrl-C would not work on all systems

    def close(self) -> None:
        """End the server and free its port."""
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = os.name != "nt"  # on Windows, other processes could take over the port

    def __init__(self, api: Api, port: int, debug: bool) -> None:
        self.api, self.debug = api, debug
        self.token = secrets.token_urlsafe(32)
        super().__init__((_LOOPBACK, port), _Handler)

    def server_bind(self) -> None:
        """Bind the socket like HTTPServer, but without a DNS lookup of the host's name."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = _LOOPBACK, self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore closed connections, except with ``debug``."""
        if self.debug:
            super().handle_error(request, client_address)


class _Refusal(Exception):
    """An error for a refused request, with the response's HTTP status and text."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    server: _Http
    server_version = "captum_ssm"
    sys_version = ""
    timeout = _SILENCE

    def do_GET(self) -> None:
        self._respond("GET")

    def do_POST(self) -> None:
        self._respond("POST")

    def _respond(self, method: str) -> None:
        """Send an asset, or with the token the page or the JSON answer of :class:`Api`."""
        address = urlsplit(self.path)
        try:
            content = self._read_body()  # before any refusal: an unread body breaks the connection
            self._check_origin()
            if method == "GET" and address.path in _ASSETS:
                return self._send_asset(_ASSETS[address.path])
            self._check_token(address.query)
            if method == "GET" and address.path == "/":
                return self._send(HTTPStatus.OK, _HTML, served_page(_POLICY).encode())
            if _QUESTIONS.get(address.path, ("", ""))[0] != method:
                reason = f"There is no such page: {method} {address.path}. Open the path / instead."
                raise _Refusal(HTTPStatus.NOT_FOUND, reason)
            request = _parse_request(content) if method == "POST" else {}
            answer = self.server.api.answer(_QUESTIONS[address.path][1], request)
            self._send(HTTPStatus.OK, "application/json", encoded(answer))
        except _Refusal as refusal:
            self._send_error(refusal.status, str(refusal))
        except CaptumSSMError as error:
            self._send_error(HTTPStatus.BAD_REQUEST, str(error))
        except ConnectionError:
            self.close_connection = True
        except Exception as error:
            if self.server.debug:
                traceback.print_exc(file=sys.stderr)
            self._send_error(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}")

    def _check_origin(self) -> None:
        """Refuse requests that a browser sends for other websites, also with DNS rebinding."""
        own = {f"{host}:{self.server.server_port}" for host in (_LOOPBACK, "localhost")}
        if self.headers.get("Host", "") not in own:
            reason = (
                f"The page opens only at {' or '.join(sorted(own))}. Open it there; from another "
                "machine, forward the same port number."
            )
            raise _Refusal(HTTPStatus.FORBIDDEN, reason)
        origin = self.headers.get("Origin")
        if origin is not None and origin not in {f"http://{host}" for host in own}:
            reason = f"Requests from {origin} are refused. Open the address that serve() printed."
            raise _Refusal(HTTPStatus.FORBIDDEN, reason)

    def _check_token(self, query: str) -> None:
        token = parse_qs(query).get("token", [""])[-1]
        if not secrets.compare_digest(token.encode(), self.server.token.encode()):
            raise _Refusal(
                HTTPStatus.FORBIDDEN,
                "The token is missing or wrong. Use the address that serve() printed.",
            )

    def _read_body(self) -> bytes | None:
        """Read the request's body; return None if its length is missing, invalid or too large."""
        size = self.headers.get("Content-Length", "")
        is_accepted = size.isdecimal() and len(size) < 9 and int(size) <= _LARGEST_REQUEST
        return self.rfile.read(int(size)) if is_accepted else None

    def _send_asset(self, name: str) -> None:
        kind = _KINDS[name.rpartition(".")[2]]
        self._send(HTTPStatus.OK, f"{kind}; charset=utf-8", asset(name).encode())

    def _send_error(self, status: HTTPStatus, reason: str) -> None:
        self._send(status, "application/json", encoded({"error": reason}))

    def _send(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print a request without its token, if ``debug`` is True."""
        if self.server.debug:
            status = arguments[1] if len(arguments) > 1 else ""
            path = urlsplit(getattr(self, "path", "")).path
            print(f"insights: {self.command} {path} {status}", file=sys.stderr)


def _parse_request(content: bytes | None) -> Mapping[str, Any]:
    """Parse the request's body as a JSON object."""
    if content is None:
        reason = f"Content-Length is missing or too large. Send at most {_LARGEST_REQUEST} bytes."
        raise _Refusal(HTTPStatus.LENGTH_REQUIRED, reason)
    try:
        request = json.loads(content)
    except (ValueError, RecursionError):
        request = None
    if not isinstance(request, dict):
        reason = "The request is not JSON, or not a JSON object. Send a JSON object."
        raise _Refusal(HTTPStatus.BAD_REQUEST, reason)
    return request


def _open_server(api: Api, port: int, debug: bool) -> _Http:
    """Return a server that listens on the port, or on a free port for 0."""
    try:
        return _Http(api, port, debug)
    except OverflowError:
        raise OptionError(f"port={port}: use 0 to 65535, or None for a free port.") from None
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        raise OptionError(
            f"port={port} cannot be used: {error.strerror}. Use a different port, or None for a "
            "free port."
        ) from None
