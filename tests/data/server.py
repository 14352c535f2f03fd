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
                self.answer(302, b"", {"Location": files.redirects[path]})
            elif path in files.listings:
                entries, following = files.listings[path]
                link = {"Link": f'<{following}>; rel="next"'} if following else {}
                self.answer(200, json.dumps(entries).encode(), link)
            elif path in files.content:
                self.file(path, files.content[path])
            else:
                self.send_error(404)

        def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def file(self, path: str, data: bytes) -> None:
            first = self.first_byte()
            if first is not None and first >= len(data):
                self.send_error(416)
                return
            rest = data[first or 0 :]
            headers = {"Content-Length": str(len(rest))} if files.lengths else {}
            if first is not None:
                headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
            sent = rest[: files.drops[path].pop(0)] if files.drops.get(path) else rest
            self.answer(200 if first is None else 206, sent, headers)

        def first_byte(self) -> int | None:
            match = re.fullmatch(r"bytes=(\d+)-", self.headers["Range"] or "")
            return int(match[1]) if match and files.ranges else None

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        files.address = f"http://127.0.0.1:{server.server_address[1]}"
        yield files
        server.shutdown()
