"""A page on this machine to ask the model with: tornado on 127.0.0.1, one answer at a time, tokens as they come.

Only a page that came from here is answered. Any site that the browser shows could send requests to this port, or let
its own name point to 127.0.0.1: so the names in Host and Origin are checked, and bodies must be JSON, which no form can
send. Other users of this machine can ask too. Leaves out what a request holds (page.py) and the page (page.html).
"""

import asyncio
import base64
import contextlib
import hashlib
import json
import os
import re
import socket
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from typing import Any

from tornado import web
from tornado.httpserver import HTTPServer
from tornado.iostream import StreamClosedError

from llmc_jax.base.errors import InputError
from llmc_jax.generate import engine
from llmc_jax.generate.engine import Drawn, Dropped, Request
from llmc_jax.generate.model import Model
from llmc_jax.generate.page import facts, parsed, request_of
from llmc_jax.generate.text import with_pieces

HOST = "127.0.0.1"
PAGE = Path(__file__).with_name("page.html")
RETRY_SECONDS = 5
# What one browser, or a program that pretends to be one, may take up.
BODY_BYTES = 1 << 20
READ_SECONDS = 10.0  # for the head of a request, and again for its body
WRITE_SECONDS = 20.0  # for one record, if nobody takes it
WAITING = 8  # for their turn on the device
SAFE = {
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}

Generate = Callable[[Model, Request], Iterator[Drawn | Dropped]]


def serve(
    model: Model,
    port: int,
    *,
    ready: Callable[["Server"], None] = lambda server: None,
    generate: Generate = engine.generate,
) -> None:
    """Answer on 127.0.0.1 until Ctrl-C; then end what is under way and return.

    port: 0 takes any free one. ready: is called as soon as the page can be opened.
    Raises InputError if the port cannot be had.
    """
    try:
        listener = socket.create_server((HOST, port), backlog=64)
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise InputError(f"--serve {port}: {why}; give another port, or 0 for any that is free") from error
    with listener, ThreadPoolExecutor(1) as device, contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
        server = Server(model, listener, device, generate)
        asyncio.run(server.answer(lambda: ready(server)))


class Server:
    """A model and those who want it: one has the device, the others wait in the order in which they came."""

    def __init__(self, model: Model, listener: socket.socket, device: Executor, generate: Generate) -> None:
        """Take a socket that listens, and an executor of one thread: nothing else computes."""
        self.model, self.generate = model, generate
        self.page = PAGE.read_bytes()
        self.policy = content_policy(self.page)
        self.port: int = listener.getsockname()[1]
        self.address = f"http://{HOST}:{self.port}"
        ends = (f":{self.port}", "") if self.port == 80 else (f":{self.port}",)  # browsers leave out the usual port
        self.names = {f"{name}{end}" for name in (HOST, "localhost") for end in ends}
        self.turn, self.asking = asyncio.Lock(), 0  # who has the device; how many have it or wait for it
        self._listener, self._device = listener, device

    async def answer(self, ready: Callable[[], None]) -> None:
        """Answer until the task is cancelled; then end every connection, and wait as long as one token takes."""
        about = json.dumps(facts(self.model)).encode()
        routes: list[Any] = [
            ("/", Fixed, {"kind": "text/html; charset=utf-8", "content": self.page}),
            ("/model", Fixed, {"kind": "application/json", "content": about}),
            ("/generate", Text),
        ]
        options: Any = {"default_handler_class": Nothing, "server": self, "log_function": lambda handler: None}
        http = HTTPServer(
            web.Application(routes, **options),
            no_keep_alive=True,
            max_body_size=BODY_BYTES,
            body_timeout=READ_SECONDS,
            idle_connection_timeout=READ_SECONDS,
        )
        self._listener.setblocking(False)
        http.add_socket(self._listener)
        try:
            ready()
            await asyncio.Event().wait()
        finally:
            http.stop()
            await http.close_all_connections()
            async with self.turn:
                pass

    def compute(self, function: Callable[..., Any], *values: Any) -> Awaitable[Any]:
        """Call a function in the thread of the device."""
        return asyncio.get_running_loop().run_in_executor(self._device, function, *values)


def content_policy(page: bytes) -> str:
    """Return the Content-Security-Policy: this page's own script and style, requests to this server, nothing else."""

    found = re.findall(rb"<(script|style)>(.*?)</\1>", page, re.DOTALL)
    own = {tag: f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'" for tag, text in found}
    return (
        f"default-src 'none'; script-src {own[b'script']}; style-src {own[b'style']}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def refusal(error: BaseException) -> tuple[int, str]:
    """Return the status of an answer that an error prevents, and a line that says why."""
    if isinstance(error, InputError):
        return HTTPStatus.BAD_REQUEST, str(error).removeprefix("--")
    if isinstance(error, web.HTTPError):
        return error.status_code, error.log_message or HTTPStatus(error.status_code).phrase
    return HTTPStatus.INTERNAL_SERVER_ERROR, "a bug in this program; the terminal shows it"


class Handler(web.RequestHandler):
    """Answers one request of the server's own page, and no other."""

    @property
    def server(self) -> Server:
        """Return the server, which tornado keeps for us."""
        found: Server = self.settings["server"]
        return found

    def set_default_headers(self) -> None:
        for name, value in {**SAFE, "Content-Security-Policy": self.server.policy}.items():
            self.set_header(name, value)

    def prepare(self) -> None:
        names = self.server.names
        if self.request.host not in names:
            where = f"this page is at {self.server.address} alone; a tunnel must have the same port at both ends"
            raise web.HTTPError(HTTPStatus.FORBIDDEN, where)
        if not {f"http://{name}" for name in names}.issuperset(self.request.headers.get_list("Origin")):
            raise web.HTTPError(HTTPStatus.FORBIDDEN, "only this server's own page may ask")

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        status, line = refusal(kwargs["exc_info"][1])
        self.set_status(status)
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            self.set_header("Retry-After", str(RETRY_SECONDS))
        self.finish({"error": line})

    def log_exception(self, typ: Any, value: Any, tb: Any) -> None:
        if not isinstance(value, InputError | web.HTTPError):  # a mistake of ours; prompts are private
            traceback.print_exception(typ, value, tb)


class Nothing(Handler):
    """Answers what asks for anything else."""

    def prepare(self) -> None:
        super().prepare()
        raise web.HTTPError(HTTPStatus.NOT_FOUND)


class Fixed(Handler):
    """Sends what does not change: the page, and what the model is."""

    def initialize(self, kind: str, content: bytes) -> None:
        self.kind, self.content = kind, content

    def get(self) -> None:
        self.set_header("Content-Type", self.kind)
        self.finish(self.content)

    head = get


@web.stream_request_body
class Text(Handler):
    """Has the model continue a text: lines of JSON, which begin with the first of them."""

    def initialize(self) -> None:
        self.body, self.begun = bytearray(), False
        self.task: asyncio.Task[None] | None = None  # what waits and answers, as long as it does

    def prepare(self) -> None:
        super().prepare()
        connection: Any = self.request.connection
        connection.set_max_body_size(1 << 62)  # all may come, or a closed connection would lose what we answer
        connection.stream.set_nodelay(True)  # a token is sent when it is there

    def data_received(self, chunk: bytes) -> None:
        if len(self.body) <= BODY_BYTES:
            self.body += chunk

    def on_connection_close(self) -> None:
        super().on_connection_close()
        if self.task:
            self.task.cancel()

    async def post(self) -> None:
        """Wait for the device, then answer until the text ends or the browser has gone."""
        request, server = self._request(), self.server
        if server.asking > WAITING:
            busy = f"{WAITING} others are waiting for this model; try again in {RETRY_SECONDS} s"
            raise web.HTTPError(HTTPStatus.SERVICE_UNAVAILABLE, busy)
        before, server.asking, self.task = server.asking, server.asking + 1, asyncio.current_task()
        try:
            if before:
                await self._send({"waiting": before})
            async with server.turn:
                await self._answer(request)
        except (StreamClosedError, asyncio.CancelledError):  # the browser has gone
            pass
        except TimeoutError:
            self.request.connection.stream.close()  # type: ignore[union-attr]
        except Exception as error:
            if not self.begun:
                raise
            self.log_exception(type(error), error, error.__traceback__)
            self.write(json.dumps({"error": refusal(error)[1]}) + "\n")
        finally:
            server.asking, self.task = server.asking - 1, None

    def _request(self) -> Request:
        kind, _, _ = self.request.headers.get("Content-Type", "").partition(";")
        if kind.strip().lower() != "application/json":
            raise web.HTTPError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "the body must be application/json")
        if len(self.body) > BODY_BYTES:
            raise web.HTTPError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body has more than {BODY_BYTES} bytes")
        return request_of(self.server.model, parsed(bytes(self.body)))

    async def _answer(self, request: Request) -> None:
        server, count, ends, began = self.server, 0, [""] * request.samples, time.monotonic()
        tokens = await server.compute(server.generate, server.model, request)
        try:
            while (token := await server.compute(next, tokens, None)) is not None:
                if isinstance(token, Dropped):
                    await self._send({"dropped": token._asdict()})
                    continue
                if not count:
                    await self._send({"prompt": len(request.prompt), "first_seconds": time.monotonic() - began})
                count += 1
                ends[token.sample] = token.end or ends[token.sample]
                await self._send(with_pieces(server.model.tokenizer, token))
            await self._send({"ends": ends, "tokens": count, "seconds": time.monotonic() - began})
        finally:
            self.task = None  # or the close itself could be cancelled
            await server.compute(tokens.close)

    async def _send(self, content: dict[str, Any]) -> None:
        """Send one record. Raises StreamClosedError where the browser has gone, TimeoutError where it takes nothing."""
        self.begun = True
        self.write(json.dumps(content) + "\n")
        self.set_header("Content-Type", "application/x-ndjson")
        await asyncio.wait_for(self.flush(), WRITE_SECONDS)
