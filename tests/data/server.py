"""A file server on this machine that can do what servers of data sets do, and what goes wrong with them."""

import http.server
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple


class Asked(NamedTuple):
    """A request that came."""

    path: str
    range: str | None
    token: str | None


@dataclass
class Files:
    """What a server has and how it behaves.

    content, listings: what stands at a path. status: paths it answers with a code. redirects: path -> address.
    drops: of a path, after how many bytes each of the next answers breaks off. ranges: does it know Range.
    lengths: does it say how long an answer is.
    """

    content: dict[str, bytes] = field(default_factory=dict)
    listings: dict[str, tuple[list[object], str | None]] = field(default_factory=dict)
    status: dict[str, list[int]] = field(default_factory=dict)
    redirects: dict[str, str] = field(default_factory=dict)
    drops: dict[str, list[int]] = field(default_factory=dict)
    ranges: bool = True
    lengths: bool = True
    asked: list[Asked] = field(default_factory=list)
    address: str = ""


@contextmanager
def serving() -> Iterator[Files]:
    """Run a server as long as the block; yield what it has, to be filled."""
    files = Files()

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            path = self.path
            files.asked.append(Asked(path, self.headers["Range"], self.headers["Authorization"]))
            if files.status.get(path):
                self.send_error(files.status[path].pop(0))
            elif path in files.redirects:
                self.send_response(302)
                self.send_header("Location", files.redirects[path])
                self.end_headers()
            elif path in files.listings:
                self.list(*files.listings[path])
            elif path in files.content:
                self.file(path, files.content[path])
            else:
                self.send_error(404)

        def list(self, entries: list[object], following: str | None) -> None:
            self.send_response(200)
            if following:
                self.send_header("Link", f'<{following}>; rel="next"')
            self.end_headers()
            self.wfile.write(json.dumps(entries).encode())

        def file(self, path: str, data: bytes) -> None:
            first = self.first_byte()
            if first is not None and first >= len(data):
                self.send_error(416)
                return
            self.send_response(200 if first is None else 206)
            if first is not None:
                self.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
            rest = data[first or 0 :]
            if files.lengths:
                self.send_header("Content-Length", str(len(rest)))
            self.end_headers()
            self.wfile.write(rest[: files.drops[path].pop(0)] if files.drops.get(path) else rest)

        def first_byte(self) -> int | None:
            match = re.fullmatch(r"bytes=(\d+)-", self.headers["Range"] or "")
            if match is None or not files.ranges:
                return None
            return int(match[1])

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        files.address = f"http://127.0.0.1:{server.server_address[1]}"
        yield files
        server.shutdown()
