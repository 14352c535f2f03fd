"""Downloads from a server on this machine: whole, wrong, missing, broken off, too slow."""

import hashlib
import http.server
import threading
import time
from collections.abc import Iterator

import pytest

from llmc_jax.base.errors import InputError
from llmc_jax.data import download as module
from llmc_jax.data.download import download

DATA = b"to be or not to be\n" * 10000
SHA256 = hashlib.sha256(DATA).hexdigest()


class Server(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/missing":
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(DATA)))
        self.end_headers()
        if self.path == "/whole":
            self.wfile.write(DATA)
        elif self.path == "/slow":
            for _ in range(50):
                self.wfile.write(b"x" * 70000)
                time.sleep(0.05)
        elif self.path == "/silent":
            time.sleep(1.0)
        else:
            self.wfile.write(DATA[:1000])


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture(autouse=True)
def _direct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def test_a_file_arrives(address: str) -> None:
    assert download(f"{address}/whole", SHA256, "it", "ask for it") == DATA


@pytest.mark.parametrize(
    ("path", "sha256", "message"),
    [
        ("whole", "0" * 64, "expected 0000000000000000…; ask for it"),
        ("missing", SHA256, "it: .*cannot be downloaded .*Not Found.*ask for it"),
        ("short", SHA256, "/short: "),
    ],
)
def test_what_is_not_the_file_is_refused(address: str, path: str, sha256: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        download(f"{address}/{path}", sha256, "it", "ask for it")
    with pytest.raises(InputError, match="cannot be downloaded"):
        download("http://127.0.0.1:9/x", SHA256, "it", "ask for it")  # no server


@pytest.mark.parametrize("path", ["slow", "silent"])
def test_waiting_has_an_end(address: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(module, "DOWNLOAD_SECONDS", 0.01)
    with pytest.raises(InputError, match="cannot be downloaded"):
        download(f"{address}/{path}", SHA256, "it", "ask for it")
