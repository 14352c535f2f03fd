"""A server that keeps one waiting for a short answer, as a list of files is."""

import http.server
import threading
import time
from collections.abc import Iterator

import pytest

from llmc_jax.data import download as module
from llmc_jax.data.download import read_all


class Server(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000000")
        self.end_headers()
        if self.path == "/slow":
            for _ in range(50):
                self.wfile.write(b"x" * 20000)
                time.sleep(0.05)
        time.sleep(1.0)


@pytest.fixture
def address() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.parametrize("path", ["slow", "silent"])
def test_waiting_has_an_end(address: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(module, "DOWNLOAD_SECONDS", 0.01)
    with pytest.raises(OSError, match=r"slow|timed out"):
        read_all(f"{address}/{path}")
