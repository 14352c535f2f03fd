"""A page on this machine to ask the model with: HTTP on 127.0.0.1, one answer at a time, tokens as they come.

Only a page that came from here is answered. Any site that the browser shows could send requests to this port, or let
its own name point to 127.0.0.1: so the names in Host and Origin are checked, and bodies must be JSON, which no form can
send. Other users of this machine can ask too. Leaves out what a request holds (page.py) and the page (page.html).
"""

import base64
import contextlib
import errno
import hashlib
import io
import json
import re
import select
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, NamedTuple

from llmc_jax.base.errors import InputError
from llmc_jax.generate import engine
from llmc_jax.generate.engine import Drawn, Dropped, Request
from llmc_jax.generate.model import Model
from llmc_jax.generate.page import facts, parsed, record, request_of

HOST = "127.0.0.1"
PAGE = Path(__file__).with_name("page.html")
RETRY_SECONDS = 5
WAKE_SECONDS = 0.2  # how often one who waits looks whether the browser is still there
LINGER_SECONDS = 1.0

Generate = Callable[[Model, Request], Iterator[Drawn | Dropped]]


class Limits(NamedTuple):
    """What one browser, or a program that pretends to be one, may take up."""

    body_bytes: int = 1 << 20
    read_seconds: float = 10.0  # for a whole request, its body included
    write_seconds: float = 20.0  # for one record, if nobody takes it
    waiting: int = 8  # for their turn on the device
    connections: int = 32


class Refused(Exception):
    """A request that gets no answer but a status and one line."""

    def __init__(self, status: int, line: str, **headers: str) -> None:
        super().__init__(line)
        self.status, self.line, self.headers = status, line, headers


def serve(
    model: Model,
    port: int,
    *,
    ready: Callable[[str], None] = lambda address: None,
    generate: Generate = engine.generate,
    limits: Limits | None = None,
) -> None:
    """Answer on 127.0.0.1 until Ctrl-C; then end what is under way and return.

    port: 0 takes any free one. ready: is called with the page's address as soon as it can be opened.
    Raises InputError if the port cannot be had.
    """
    with listening(model, port, generate=generate, limits=limits) as server, contextlib.suppress(KeyboardInterrupt):
        ready(server.address)
        server.serve_forever()


@contextlib.contextmanager
def listening(
    model: Model, port: int, *, generate: Generate = engine.generate, limits: Limits | None = None
) -> Iterator["Server"]:
    """Yield a server that listens and answers as soon as its `serve_forever` runs; closes it. Raises as `serve`."""
    if not 0 <= port < 1 << 16:
        raise InputError(f"--serve {port}: no such port; give one from 1024 to 65535, or 0 for any that is free")
    try:
        server = Server(model, port, generate, limits or Limits())
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            why = "another program has this port"
        elif error.errno == errno.EACCES:
            why = "this port needs rights that you do not have"
        else:
            why = f"cannot listen on {HOST} ({error.strerror})"
        raise InputError(f"--serve {port}: {why}; give another one, or 0 for any that is free") from error
    try:
        yield server
    finally:
        server.close()


# ----- whose turn it is ---------------------------------------------------------------------------------------------


class Line:
    """Those who want the device: one has it, the others wait in the order in which they came, and only so many."""

    def __init__(self, most_waiting: int) -> None:
        self._most = most_waiting + 1
        self._changed = threading.Condition()
        self._places: list[object] = []

    @contextlib.contextmanager
    def place(self) -> Iterator[object]:
        """Yield a place at the end of the line, and leave it. Raises Refused if the line is full."""
        place = object()
        with self._changed:
            if len(self._places) >= self._most:
                line = f"{self._most - 1} others are waiting for this model; try again in {RETRY_SECONDS} s"
                raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, line, Retry_After=str(RETRY_SECONDS))
            self._places.append(place)
        try:
            yield place
        finally:
            with self._changed:
                self._places.remove(place)
                self._changed.notify_all()

    def before(self, place: object, seconds: float = 0) -> int:
        """Return how many stand before a place, having waited up to so many seconds for it to be the first."""
        with self._changed:
            self._changed.wait_for(lambda: self._places[0] is place, seconds)
            return self._places.index(place)


# ----- the server ---------------------------------------------------------------------------------------------------


class Server(socketserver.ThreadingTCPServer):
    """Listens on 127.0.0.1, one thread for each connection, one request on each."""

    allow_reuse_address = True
    request_queue_size = 64
    daemon_threads = False  # nothing may cut off a thread inside XLA: closing waits for them

    def __init__(self, model: Model, port: int, generate: Generate, limits: Limits) -> None:
        self.model, self.generate, self.limits = model, generate, limits
        self.line = Line(limits.waiting)
        self.page = PAGE.read_bytes()
        self.policy = content_policy(self.page)
        self._connections: set[Any] = set()
        self._guard = threading.Lock()
        super().__init__((HOST, port), Handler)
        self.port = self.server_address[1]
        self.names = {f"{name}{end}" for name in (HOST, "localhost") for end in self._ends()}

    def _ends(self) -> tuple[str, ...]:
        """Return what may follow the name in an address: browsers leave out the usual port."""
        return (f":{self.port}", "") if self.port == 80 else (f":{self.port}",)

    @property
    def address(self) -> str:
        """Return what to type into a browser."""
        return f"http://{HOST}:{self.port}"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a connection, unless there are too many."""
        with self._guard:
            full = len(self._connections) >= self.limits.connections
            if not full:
                self._connections.add(request)
        if full:
            request.setblocking(False)
            with contextlib.suppress(OSError):
                request.sendall(b"HTTP/1.1 503 Too many connections\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self._guard:
            self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Show the traceback of a mistake of ours; a browser that has gone is none."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def close(self) -> None:
        """Stop listening, end every connection, and wait for the threads: as long as one token takes."""
        self.socket.close()
        with self._guard:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        self.server_close()


def content_policy(page: bytes) -> str:
    """Return the Content-Security-Policy: this page's own script and style, requests to this server, nothing else."""

    def hashes(tag: str) -> str:
        found = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), page, re.DOTALL)
        return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'" for text in found)

    return (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


class _Timed(io.RawIOBase):
    """Reads a connection; all that is read may take so many seconds together, however slowly it drips."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self._connection, self._end = connection, time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)


# ----- one request --------------------------------------------------------------------------------------------------


class Handler(BaseHTTPRequestHandler):
    """Answers one request on a connection, and closes it."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a token is sent when it is there
    server: Server

    def setup(self) -> None:
        """Put the limit of time on what is read."""
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(_Timed(self.connection, self.server.limits.read_seconds))
        self._unread = False

    def handle(self) -> None:
        """Answer one request."""
        self.close_connection = True
        self.handle_one_request()

    def finish(self) -> None:
        """Close; drop what comes of a refused body first: a connection that is reset loses the answer."""
        if self._unread:
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_WR)
                rest = _Timed(self.connection, LINGER_SECONDS)
                while rest.readinto(bytearray(1 << 16)):
                    pass
        super().finish()

    def respond(self) -> None:
        """Answer a request of any method."""
        self._unread = "Content-Length" in self.headers or "Transfer-Encoding" in self.headers
        try:
            self._route()
        except Refused as refused:
            self.refuse(refused.status, refused.line, **refused.headers)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = respond

    def _route(self) -> None:
        self._check_host()
        routes = {"/": ("GET", self._page), "/model": ("GET", self._facts), "/generate": ("POST", self._generate)}
        path = self.path.partition("?")[0]
        if path not in routes:
            raise Refused(HTTPStatus.NOT_FOUND, f"there are {', '.join(routes)}, and nothing else")
        method, answer = routes[path]
        if self.command != method and (method, self.command) != ("GET", "HEAD"):
            raise Refused(HTTPStatus.METHOD_NOT_ALLOWED, f"{path} takes {method}", Allow=method)
        answer()

    def _check_host(self) -> None:
        if len(hosts := self.headers.get_all("Host", [])) != 1 or hosts[0].strip() not in self.server.names:
            line = f"this page is at {self.server.address} alone; a tunnel must have the same port at both ends"
            raise Refused(HTTPStatus.FORBIDDEN, line)
        origins = {f"http://{name}" for name in self.server.names}
        if not origins.issuperset(self.headers.get_all("Origin", [])):
            raise Refused(HTTPStatus.FORBIDDEN, "only this server's own page may ask")

    def _page(self) -> None:
        self._send(HTTPStatus.OK, "text/html; charset=utf-8", self.server.page)

    def _facts(self) -> None:
        self._send_json(HTTPStatus.OK, facts(self.server.model))

    def _generate(self) -> None:
        try:
            request = request_of(self.server.model, parsed(self._body()))
        except InputError as error:
            raise Refused(HTTPStatus.BAD_REQUEST, str(error).removeprefix("--")) from error
        records = Records(self)
        with self.server.line.place() as place:
            told = 0
            while before := self.server.line.before(place, WAKE_SECONDS):
                if self.left():
                    return
                if before != told:
                    records.send({"waiting": before})
                told = before
            records.answer(request)
            engine.drop_programs()

    def _body(self) -> bytes:
        if self.headers.get_content_type() != "application/json":
            raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "the body must be application/json")
        lengths = self.headers.get_all("Content-Length", [])
        if "Transfer-Encoding" in self.headers or len(lengths) != 1:
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "the body needs one Content-Length, and no Transfer-Encoding")
        if not re.fullmatch("[0-9]{1,18}", lengths[0].strip()):
            raise Refused(HTTPStatus.BAD_REQUEST, "Content-Length: expected a whole number")
        length, most = int(lengths[0]), self.server.limits.body_bytes
        if length > most:
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body has {length} bytes; the most is {most}")
        try:
            body = self.rfile.read(length)
        except TimeoutError as error:
            raise Refused(HTTPStatus.REQUEST_TIMEOUT, "the body did not come in time") from error
        self._unread = False
        if len(body) < length:
            raise Refused(HTTPStatus.BAD_REQUEST, f"the body ended after {len(body)} of {length} bytes")
        return body

    def left(self) -> bool:
        """Return whether the browser has closed the connection; what it sends besides its request is dropped."""
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        if not poll.poll(0):
            return False
        try:
            return not self.connection.recv(1 << 16)
        except OSError:
            return True

    # what is sent

    def begin(self, status: int, kind: str, **headers: str) -> None:
        """Send the first lines of an answer."""
        self.connection.settimeout(self.server.limits.write_seconds)
        self.send_response_only(status)
        safe = {
            "Content-Type": kind,
            "Content-Security-Policy": self.server.policy,
            "X-Content-Type-Options": "nosniff",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
            "Connection": "close",
        }
        for name, value in (safe | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def _send(self, status: int, kind: str, content: bytes, **headers: str) -> None:
        self.begin(status, kind, Content_Length=str(len(content)), **headers)
        if self.command != "HEAD":
            self.wfile.write(content)

    def _send_json(self, status: int, content: Any, **headers: str) -> None:
        self._send(status, "application/json", json.dumps(content).encode(), **headers)

    def refuse(self, status: int, line: str, **headers: str) -> None:
        """Send a status and one line that says why."""
        self._send_json(status, {"error": line}, **headers)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse what is no request that HTTP knows."""
        self.refuse(code, message or HTTPStatus(code).phrase)

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing: prompts are private."""


class Records:
    """An answer to POST /generate: lines of JSON, which begin with the first of them."""

    def __init__(self, handler: Handler) -> None:
        self._handler, self._begun = handler, False
        self._chunked = handler.request_version == "HTTP/1.1"  # for 1.0 the end of the connection is the end

    def send(self, content: dict[str, Any]) -> None:
        """Send one record."""
        if not self._begun:
            encoding = {"Transfer_Encoding": "chunked"} if self._chunked else {}
            self._handler.begin(HTTPStatus.OK, "application/x-ndjson", **encoding)
            self._begun = True
        self._write(json.dumps(content).encode() + b"\n")

    def _write(self, data: bytes) -> None:
        self._handler.wfile.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def answer(self, request: Request) -> None:
        """Send the tokens of a request as they come, until it ends or the browser has gone."""
        try:
            whole = self._tokens(request)
        except InputError as error:
            self._fail(HTTPStatus.BAD_REQUEST, str(error).removeprefix("--"))
        except OSError:  # the browser's connection
            raise
        except Exception:
            self._fail(HTTPStatus.INTERNAL_SERVER_ERROR, "a bug in this program; the terminal shows it")
            raise
        else:
            if whole and self._chunked:
                self._write(b"")

    def _tokens(self, request: Request) -> bool:
        """Send tokens; return whether that was all of them."""
        server, count, began = self._handler.server, 0, time.monotonic()
        ends = [""] * request.samples
        with contextlib.closing(server.generate(server.model, request)) as tokens:  # type: ignore[type-var]
            for token in tokens:
                if self._handler.left():
                    return False
                if isinstance(token, Dropped):
                    self.send({"dropped": token._asdict()})
                    continue
                if not count:
                    self.send({"prompt": len(request.prompt), "first_seconds": time.monotonic() - began})
                count += 1
                ends[token.sample] = token.end or ends[token.sample]
                self.send(record(server.model, token))
        self.send({"ends": ends, "tokens": count, "seconds": time.monotonic() - began})
        return True

    def _fail(self, status: int, line: str) -> None:
        if not self._begun:
            self._handler.refuse(status, line)
            return
        self.send({"error": line})
        if self._chunked:
            self._write(b"")
