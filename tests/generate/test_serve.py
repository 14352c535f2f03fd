"""The page's server over real sockets, with engines made up for each test; and the page in a browser, where one is."""

import asyncio
import base64
import hashlib
import http.client
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llmc_jax.base.errors import InputError
from llmc_jax.checkpoint.llmc import write_model
from llmc_jax.config.model import parse_descriptor
from llmc_jax.data.tokenizers import bytes_tokenizer
from llmc_jax.generate import engine
from llmc_jax.generate.engine import Drawn, Dropped, Request
from llmc_jax.generate.model import Model, open_model
from llmc_jax.generate.sampling import Sampling
from llmc_jax.generate.serve import Server, serve
from llmc_jax.generate.text import TextStream
from llmc_jax.models.layout import num_parameters
from tests import chromium, plain_model
from tests.waiting import wait_until

CONFIG = parse_descriptor("L2-NH2-C16-V257-T32")
BYTES = bytes_tokenizer()
WEIGHTS: Any = SimpleNamespace(wte=np.zeros(1, np.float32))
MODEL = Model(Path("runs/tiny"), "state", 7, CONFIG, WEIGHTS, BYTES, "bytes", 256)

Engine = Callable[[Model, Request], Iterator[Drawn | Dropped]]


def drawn(text: str, position: int = 0, end: str = "") -> Drawn:
    token = ord(text[0]) % 256
    return Drawn(0, position, token, -0.5, ((token, -0.5), (195, -2.0)), text, end)


def say(words: str) -> Engine:
    """An engine that says these characters and nothing else."""

    def generate(model: Model, request: Request) -> Iterator[Drawn | Dropped]:
        for position, letter in enumerate(words):
            yield drawn(letter, position, "length" if position + 1 == len(words) else "")

    return generate


class Gated:
    """An engine whose tokens come one by one, as a test lets them; `closed` tells that somebody has stopped it."""

    def __init__(self) -> None:
        self.gate, self.closed, self.begun = threading.Semaphore(0), threading.Event(), 0

    def __call__(self, model: Model, request: Request) -> Iterator[Drawn | Dropped]:
        self.begun += 1
        try:
            for position in range(request.tokens):
                assert self.gate.acquire(timeout=10)
                yield drawn("x", position, "length" if position + 1 == request.tokens else "")
        finally:
            self.closed.set()


@contextmanager
def served(generate: Engine, model: Model = MODEL, **limits: float) -> Iterator[Server]:
    """A server in a thread, which is ended as Ctrl-C ends it."""
    started: Queue[tuple[Server, Callable[[], object]]] = Queue()

    def ready(server: Server) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        started.put((server, lambda: loop.call_soon_threadsafe(task.cancel)))

    options: Any = {"ready": ready, "generate": generate}
    thread = threading.Thread(target=serve, args=(model, 0), kwargs=options)
    with pytest.MonkeyPatch.context() as patch:
        for name, limit in limits.items():
            patch.setattr(f"llmc_jax.generate.serve.{name}", limit)
        thread.start()
        server, stop = started.get(timeout=10)
        try:
            yield server
        finally:
            stop()
            thread.join()


@contextmanager
def answer(
    server: Server, method: str, path: str, body: bytes | None = None, **headers: str
) -> Iterator[http.client.HTTPResponse]:
    """Send one request; with a body it is JSON unless a header says otherwise. `_` stands for `-` in their names."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    if body is not None:
        headers = {"Content_Type": "application/json"} | headers
    connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    response = connection.getresponse()
    try:
        yield response
    finally:
        response.close()
        connection.close()


def asked(server: Server, **content: Any) -> AbstractContextManager[http.client.HTTPResponse]:
    return answer(server, "POST", "/generate", json.dumps(content).encode())


def all_records(server: Server, **content: Any) -> list[dict[str, Any]]:
    with asked(server, **content) as response:
        assert (response.status, response.headers["Content-Type"]) == (200, "application/x-ndjson")
        lines = response.readlines()
    assert all(line.endswith(b"\n") for line in lines)
    return [json.loads(line) for line in lines]


def refusal(
    server: Server, body: bytes | None, method: str = "POST", path: str = "/generate", **headers: str
) -> tuple[int, str]:
    with answer(server, method, path, body, **headers) as response:
        return response.status, json.loads(response.read())["error"]


# ----- what is answered


def test_every_token_is_sent_before_the_next_one_is_drawn() -> None:
    gated = Gated()
    with served(gated) as server:
        gated.gate.release()
        with asked(server, prompt="Hi", tokens=2) as response:
            first = json.loads(response.readline())
            assert first["prompt"] == 2 and first["first_seconds"] >= 0
            assert json.loads(response.readline()) == {
                "sample": 0, "position": 0, "token": 120, "piece": "x", "text": "x", "logprob": -0.5,
                "candidates": [[120, "x", -0.5], [195, "\\xc3", -2.0]], "end": "",
            }  # fmt: skip
            gated.gate.release()
            rest = [json.loads(line) for line in response]
    assert [record.get("end") for record in rest] == ["length", None]
    assert (rest[1]["ends"], rest[1]["tokens"]) == (["length"], 2) and rest[1]["seconds"] > 0


def test_the_engine_gets_what_was_asked_for_and_the_page_what_it_gave() -> None:
    requests = []

    def generate(model: Model, request: Request) -> Iterator[Drawn | Dropped]:
        requests.append(request)
        stream = TextStream(model.tokenizer)
        yield Dropped(0, 16)
        for position, token in enumerate("é😀".encode()):
            yield Drawn(0, position, token, -1.0, (), stream.add(token), "")

    with served(generate) as server:
        sampling = Sampling(0.5, 3, 0.9, 11)
        content = {"tokens": 9, "samples": 2, "candidates": 4, "stops": ["\n"], "after": [1, 2], "prompt": "é"}
        records = all_records(server, **content, **sampling._asdict())
        all_records(server)
        with answer(server, "GET", "/model?x") as response:
            facts = json.load(response)
    assert requests[0] == Request((195, 169, 1, 2), 9, 2, sampling, ("\n",), candidates=4)
    assert requests[1] == Request((256,), 200, candidates=5)  # the beginning of a text
    assert records[0] == {"dropped": {"position": 0, "kept": 16}}
    assert [(record["text"], record["piece"]) for record in records[2:-1]] == [
        ("", "\\xc3"), ("é", "\\xa9"), ("", "\\xf0"), ("", "\\x9f"), ("", "\\x98"), ("😀", "\\x80"),
    ]  # fmt: skip
    assert facts["parameters"] == num_parameters(CONFIG) and facts["defaults"]["seed"] == Sampling().seed
    values = [facts[name] for name in ("path", "step", "shape", "T", "dtype", "tokenizer")]
    assert values == ["runs/tiny", 7, "L2-NH2-C16-V257-T32", 32, "fp32", "bytes"]


def test_a_model_without_a_tokenizer_takes_ids() -> None:
    requests = []

    def generate(model: Model, request: Request) -> Iterator[Drawn | Dropped]:
        requests.append(request)
        yield drawn("A")

    with served(generate, MODEL._replace(tokenizer=None)) as server:
        assert all_records(server, prompt=" 12 256\n")[1]["piece"] == "65"
        assert requests[0].prompt == (12, 256)
        for prompt in ("12 x", "257", "²", "-1"):
            status, line = refusal(server, json.dumps({"prompt": prompt}).encode())
            assert status == 400 and line.startswith("prompt: ")


def test_the_page_may_load_nothing_but_itself() -> None:
    with served(say("x")) as server:
        with answer(server, "GET", "/") as response:
            page, headers = response.read(), response.headers
        with answer(server, "HEAD", "/") as response:
            assert (response.headers["Content-Length"], response.read()) == (str(len(page)), b"")
    rules = dict(rule.split(" ", 1) for rule in headers["Content-Security-Policy"].split("; "))
    assert (rules["default-src"], rules["connect-src"], rules["frame-ancestors"]) == ("'none'", "'self'", "'none'")
    for tag, rule in ((b"script", "script-src"), (b"style", "style-src")):
        (text,) = re.findall(b"<%b>(.*)</%b>" % (tag, tag), page, re.DOTALL)
        assert rules[rule] == f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"
    assert (headers["Cache-Control"], headers["X-Content-Type-Options"]) == ("no-store", "nosniff")
    assert headers["Access-Control-Allow-Origin"] is None
    for word, allowed in ((b"innerHTML", b"never innerHTML"), (b"://", b"xmlns='http://www.w3.org/2000/svg'")):
        assert page.count(word) == page.count(allowed) == 1


# ----- what is refused


@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ({"Host": "127.0.0.1:PORT"}, True),
        ({"Host": "localhost:PORT", "Origin": "http://localhost:PORT"}, True),
        ({"Host": "127.0.0.1"}, False),
        ({"Host": "127.0.0.1:1"}, False),
        ({"Host": "evil.example:PORT"}, False),
        ({"Host": "evil.example:PORT", "Origin": "http://evil.example:PORT"}, False),
        ({"Origin": "http://evil.example"}, False),
        ({"Origin": "https://127.0.0.1:PORT"}, False),
        ({"Origin": "null"}, False),
    ],
)
def test_only_this_page_may_ask(headers: dict[str, str], allowed: bool, server: Server) -> None:
    filled = {name: value.replace("PORT", str(server.port)) for name, value in headers.items()}
    for method, path, body in (("GET", "/", None), ("GET", "/model", None), ("POST", "/generate", b"{}")):
        with answer(server, method, path, body, **filled) as response:
            assert response.status == (200 if allowed else 403)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with served(say("x"), BODY_BYTES=2000, READ_SECONDS=0.25) as server:
        yield server


@pytest.mark.parametrize(
    ("method", "path", "headers", "body", "status"),
    [
        ("GET", "/page.html", {}, None, 404),
        ("POST", "/", {}, b"{}", 405),
        ("GET", "/generate", {}, None, 405),
        ("OPTIONS", "/generate", {}, None, 405),
        ("BREW", "/model", {}, None, 405),
        ("POST", "/generate", {"Content_Type": "text/plain"}, b"{}", 415),
        ("POST", "/generate", {"Content_Type": "application/x-www-form-urlencoded"}, b"{}", 415),
        ("POST", "/generate", {}, b" " * 2001, 413),
        ("POST", "/generate", {}, b"x" * 3_000_000, 413),  # more than the connection holds: all must be read
    ],
)
def test_what_http_refuses(
    method: str, path: str, headers: dict[str, str], body: bytes | None, status: int, server: Server
) -> None:
    found, line = refusal(server, body, method, path, **headers)
    assert found == status and "\n" not in line


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"", "body"), (b"{", "body"), (b"[]", "body"), (b'"x"', "body"), (b"\xff{}", "body"), (b"[" * 1900, "body"),
        (b'{"top_p": NaN}', "body"), (b'{"seed": %b}' % (b"9" * 1900), "seed"), (b'{"top_p": 1e999}', "top_p"),
        (b'{"top_p": %b}' % (b"9" * 1900), "top_p"), (b'{"top_p": true}', "top_p"), (b'{"top_p": 2}', "top_p"),
        (b'{"temperature": -1}', "temperature"), (b'{"temperature": "hot"}', "temperature"),
        (b'{"seed": -1}', "seed"), (b'{"seed": 1.5}', "seed"), (b'{"tokens": 0}', "tokens"),
        (b'{"tokens": 1000000000}', "tokens"), (b'{"samples": 9}', "samples"), (b'{"candidates": 21}', "candidates"),
        (b'{"prompt": 5}', "prompt"), (b'{"after": [257]}', "prompt"), (b'{"after": "x"}', "after"),
        (b'{"stops": [""]}', "stops"), (b'{"stops": "x"}', "stops"), (b'{"top_kk": 1}', "top_kk"),
    ],
)  # fmt: skip
def test_bad_values_are_named(body: bytes, word: str, server: Server) -> None:
    status, line = refusal(server, body)
    assert status == 400 and "\n" not in line and len(line) < 300
    assert word in line.split(":")[0].replace("-", "_")


def test_what_the_engine_refuses_and_mistakes_of_ours(capfd: pytest.CaptureFixture[str]) -> None:
    errors: dict[int, Exception] = {1: InputError("--samples 8: too many"), 2: ZeroDivisionError()}

    def generate(model: Model, request: Request) -> Iterator[Drawn | Dropped]:
        if request.samples > 1:
            raise errors[request.tokens]
        return later(request)

    def later(request: Request) -> Iterator[Drawn | Dropped]:
        yield drawn("x")
        raise errors[request.tokens]

    with served(generate) as server:
        last = [all_records(server, tokens=tokens)[-1]["error"] for tokens in errors]
        first = [refusal(server, b'{"samples": 2, "tokens": %d}' % tokens) for tokens in errors]
    assert first == list(zip((400, 500), last, strict=True))
    assert last[0] == "samples 8: too many" and last[1].startswith("a bug")
    assert capfd.readouterr().err.count("ZeroDivisionError") == 2


def test_slow_requests_end(server: Server) -> None:
    head = f"POST /generate HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n"
    for sent in (head, f"{head}Content-Type: application/json\r\nContent-Length: 9\r\n\r\n{{"):
        began = time.monotonic()  # before the server's clock starts, which it does as it accepts
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            for piece in (sent[:-1], sent[-1:]):  # it drips: each piece comes in time, all of them do not
                connection.sendall(piece.encode())
                time.sleep(0.1)
            assert connection.recv(12) == b""
            assert time.monotonic() - began >= 0.25


# ----- whose turn it is, and who leaves


def test_one_answer_at_a_time_and_only_some_wait() -> None:
    gated = Gated()
    with served(gated, WAITING=1) as server, ThreadPoolExecutor(1) as thread:
        first = thread.submit(all_records, server, tokens=2)
        wait_until(lambda: gated.begun == 1)
        with asked(server, tokens=1) as second:
            assert json.loads(second.readline()) == {"waiting": 1}
            with answer(server, "POST", "/generate", b"{}") as third:
                assert third.status == 503 and int(third.headers["Retry-After"]) > 0
            assert gated.begun == 1
            gated.gate.release(3)
            assert json.loads(second.readlines()[-1])["tokens"] == 1
        assert first.result()[-1]["tokens"] == 2 and gated.begun == 2


def test_who_leaves_stops_the_engine_and_gives_up_the_place() -> None:
    gated = Gated()
    with served(gated) as server:
        gated.gate.release()
        with asked(server, tokens=100000) as response:
            response.readline()
            with asked(server, tokens=100000) as waits:
                assert json.loads(waits.readline()) == {"waiting": 1}
            wait_until(lambda: server.asking == 1)
        gated.gate.release()
        assert gated.closed.wait(10)
        wait_until(lambda: not server.asking)
    assert gated.begun == 1


# ----- beginning and end


def test_a_port_that_cannot_be_had(server: Server) -> None:
    with pytest.raises(InputError, match=rf"^--serve {server.port}: .*0 for any") as error:
        serve(MODEL, server.port, generate=say("x"))
    assert "\n" not in str(error.value)


def test_ctrl_c_ends_it_with_what_is_under_way() -> None:
    gated, found = Gated(), list[Any]()

    def browse(server: Server) -> None:
        with asked(server) as response:
            try:
                found.append(response.readline())
            finally:  # nothing else ends the server
                os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
            gated.gate.release()
            with pytest.raises((http.client.IncompleteRead, ConnectionError)):
                response.read()

    gated.gate.release()
    with ThreadPoolExecutor(1) as thread:
        serve(MODEL, 0, ready=lambda server: found.append(thread.submit(browse, server)), generate=gated)
        found[0].result()
    assert len(found) == 2 and gated.closed.is_set()


# ----- in a browser

EVIL = "<img src=x onerror=alert(1)><b>&amp;\n"
TOKENS = "[...document.querySelectorAll('.tok')]"
TEXT = f"{TOKENS}.map(token => token.textContent).join('')"
READY = "typeof model !== 'undefined' && model !== null"
CARD = "$('card')"


def one_of_three(model: Model, request: Request) -> Iterator[Drawn | Dropped]:
    """The model, but for two prompts: one text comes that would be HTML, and one without an end."""
    prompt = BYTES.decode(request.prompt)
    if prompt == b"evil":
        yield from say(EVIL)(model, request)
    elif prompt == b"slow":
        for position in range(100_000):
            time.sleep(0.01)
            yield drawn("x", position)
    else:
        yield from engine.generate(model, request)


@pytest.mark.slow
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    if (binary := chromium.find()) is None:
        pytest.skip("no Chromium on this machine that starts ($CHROMIUM names one)")
    flat = plain_model.random_flat(CONFIG, num_parameters(CONFIG), seed=1).astype(np.float32)
    write_model(tmp_path / "model.bin", CONFIG, flat)
    model = open_model(tmp_path / "model.bin")
    with served(one_of_three, model) as server, chromium.browser(binary, tmp_path / "profile") as tab:
        tab.command("Page.navigate", url=server.address)
        tab.until(READY)
        check_a_text(tab, model)
        check_its_tokens(tab)
        check_a_phone(tab)
        write_prompt(tab, "evil")
        tab.until(f"asking === null && {TOKENS}.length === {len(EVIL)}")
        assert tab.run(TEXT) == EVIL and tab.run("document.querySelectorAll('#list img, #list b').length") == 0
        check_that_it_stops(tab, server)
        check_errors_and_settings(tab)
        assert tab.complaints == []


def write_prompt(tab: chromium.Tab, prompt: str) -> None:
    """Type a prompt and press Ctrl+Enter."""
    tab.run("$('prompt').value = ''; $('prompt').focus()")
    tab.type(prompt)
    tab.press("Enter", 13, chromium.CTRL)


def drawn_by(model: Model, prompt: str, tokens: int, seed: int) -> list[Drawn]:
    request = Request(tuple(BYTES.encode(prompt).tolist()), tokens, sampling=Sampling(seed=seed))
    return [event for event in engine.generate(model, request) if isinstance(event, Drawn)]


def check_a_text(tab: chromium.Tab, model: Model) -> None:
    """The text that streams is the engine's, and going on with it gives what more tokens would have been."""
    tab.run("put('tokens', 6); put('seed', 11); $('fresh').checked = false")
    write_prompt(tab, "Héllo")
    tab.until(f"asking === null && {TOKENS}.length === 6")
    assert tab.run(TEXT) == "".join(event.text for event in drawn_by(model, "Héllo", 6, 11))
    assert "as many tokens" in tab.run("$('status').textContent")
    tab.run("document.querySelector('.more').click()")
    tab.until(f"asking === null && {TOKENS}.length === 12")
    ids = tab.run(f"{TOKENS}.map(token => token.record.token)")
    assert ids == [event.token for event in drawn_by(model, "Héllo", 12, 11)]


def middle(tab: chromium.Tab, token: int) -> tuple[float, float]:
    """Where on the screen a token is."""
    box = f"{TOKENS}[{token}].getBoundingClientRect()"
    x, y = tab.run(f"(box => [box.left + box.width / 2, box.top + box.height / 2])({box})")
    return x, y


def check_its_tokens(tab: chromium.Tab) -> None:
    """Probabilities are shown where the mouse points and where the keyboard is, and the mouse takes them away."""
    tab.run(f"{TOKENS}[2].scrollIntoView({{block: 'center'}})")
    tab.point(*middle(tab, 2))
    tab.until(f"!{CARD}.hidden")
    record = tab.run(f"{TOKENS}[2].record")
    shown = tab.run(f"{CARD}.innerText")
    assert f"{100 * np.exp(record['logprob']):.3f} %" in shown or f"{100 * np.exp(record['logprob']):.2f} %" in shown
    assert f"id {record['token']}" in shown
    drawn_too = record["token"] not in [token for token, *_ in record["candidates"]]
    assert tab.run(f"{CARD}.querySelectorAll('tr').length") == 5 + drawn_too
    tab.point(1, 1)
    tab.until(f"{CARD}.hidden")
    tab.run(f"{TOKENS}[0].focus()")
    tab.press("ArrowRight", 39)
    assert tab.run(f"document.activeElement === {TOKENS}[1] && shown === {TOKENS}[1] && !{CARD}.hidden")
    assert tab.run(f"{TOKENS}[1].getAttribute('aria-describedby')") == "card"


def check_a_phone(tab: chromium.Tab) -> None:
    """A tap shows a token's probabilities, and nothing is wider than the screen."""
    tab.command("Emulation.setDeviceMetricsOverride", width=360, height=740, deviceScaleFactor=2, mobile=True)
    tab.command("Emulation.setTouchEmulationEnabled", enabled=True)
    assert tab.run("document.documentElement.scrollWidth") == 360
    tab.run(f"document.activeElement.blur(), {TOKENS}[3].scrollIntoView({{block: 'center'}})")
    tab.until(f"{CARD}.hidden")
    x, y = middle(tab, 3)
    tab.command("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
    tab.command("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    tab.until(f"shown === {TOKENS}[3] && document.activeElement === shown")
    tab.command("Emulation.setTouchEmulationEnabled", enabled=False)


def check_that_it_stops(tab: chromium.Tab, server: Server) -> None:
    """Esc stops a text that has no end, and the engine with it."""
    write_prompt(tab, "slow")
    tab.until(f"asking !== null && {TOKENS}.length > 3")
    tab.press("Escape", 27)
    tab.until("asking === null && $('status').textContent === 'Stopped.'")
    wait_until(lambda: not server.asking)


def check_errors_and_settings(tab: chromium.Tab) -> None:
    """What the server refuses is shown where it was asked; settings are there again after the page is."""
    tab.run("put('temperature', 0.5); $('stops').value = 'a'.repeat(201)")
    tab.run("$('mono').click()")
    write_prompt(tab, "last")
    assert tab.until("asking === null && $('error').textContent").startswith("stops: ")
    tab.complaints.clear()  # the browser logs every 400
    tab.command("Page.reload")
    tab.until(f"{READY} && $('prompt').value === 'last'")
    assert tab.run("[settings().temperature, settings().tokens, settings().seed]") == [0.5, 6, 11]
    fonts = tab.run("[...document.querySelectorAll('#prompt, #stops')].map(each => getComputedStyle(each).fontFamily)")
    assert ["monospace" in font for font in fonts] == [True, False]
