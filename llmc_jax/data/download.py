"""Downloads: to the disk, resumed where they broke off, and checked; a server's short answers into memory.

Leaves out what is downloaded and where it is kept (tokenizers.py, corpora.py, datasets.py), and how Hugging Face names
its files (hub.py).
"""

import contextlib
import functools
import hashlib
import http.client
import os
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from email.message import Message
from pathlib import Path
from typing import IO, Any, NamedTuple
from urllib.parse import urlsplit

from llmc_jax.base.errors import InputError
from llmc_jax.base.files import leads_to, made_folder, reason, refuse_irregular, refusing, sync, try_lock
from llmc_jax.base.progress import show_bytes
from llmc_jax.base.streams import print_error

ANSWER_SECONDS = 10.0  # to connect, and between two pieces of the answer
DOWNLOAD_SECONDS = 120.0  # for a whole answer of `read_all`; a file may take days, as long as bytes come
STALL_SECONDS = 20.0  # between two pieces of a large file
WAIT_SECONDS = 0.2  # between two looks at another process's download
MAX_BYTES = 1 << 26
BLOCK_BYTES = 1 << 20
PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0)  # seconds before an attempt that follows one that brought nothing
BUSY = frozenset({408, 425, 429, 500, 502, 503, 504})  # worth another attempt

Progress = Callable[[int, int | None], None]  # bytes that are there, and of how many (None: not known)
Arrived = Callable[[str, int, int | None], None]  # a file's name, and that


class Remote(NamedTuple):
    """A file on servers, and what is known of it beforehand (None: not): at least one of the digests.

    sha1: git's, of "blob SIZE\\0" and the content, as Hugging Face tells it for small files. what: the file in words.
    advice: what to do without it. token: is sent to the address's host alone.
    """

    url: str
    what: str
    advice: str
    size: int | None = None
    sha256: str | None = None
    sha1: str | None = None
    token: str | None = None


# ----- what is asked -------------------------------------------------------------------------------------------------


def read_all(url: str, token: str | None = None) -> tuple[bytes, Message]:
    """Return what an address answers, and its headers. Raises OSError, ValueError and HTTPException."""
    deadline = time.monotonic() + DOWNLOAD_SECONDS
    data = bytearray()
    with _open(url, token, {}, ANSWER_SECONDS) as answer:
        while chunk := answer.read(1 << 16):
            data += chunk
            if time.monotonic() > deadline or len(data) > MAX_BYTES:
                raise TimeoutError(f"stopped after {len(data)} bytes: too slow or too large")
        return bytes(data), answer.headers


def explained(error: BaseException, token: str | None) -> str:
    """Return in words why a download failed, and what helps where a login or the law is in the way."""
    if not isinstance(error, urllib.error.HTTPError):
        return reason(error.reason if isinstance(error, urllib.error.URLError) else error)
    login = "HF_TOKEN is refused: were the terms on its page accepted?" if token else "set HF_TOKEN if it needs a login"
    helps = {401: f" ({login})", 403: f" ({login})", 451: " (it is blocked)"}.get(error.code, "")
    return f"the server answers {error.code} {reason(error.reason)}{helps}"


def _open(url: str, token: str | None, headers: dict[str, str], seconds: float) -> http.client.HTTPResponse:
    request = urllib.request.Request(url, headers={"User-Agent": "llmc-jax", **headers})
    if token:
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    handlers = urllib.request.HTTPSHandler(context=_certificates()), _Redirects()
    answer: http.client.HTTPResponse = urllib.request.build_opener(*handlers).open(request, timeout=seconds)
    return answer


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, and hands a token on to the same host alone: another one's signed address is no friend's."""

    def redirect_request(self, req: urllib.request.Request, *answer: Any) -> urllib.request.Request | None:
        new = super().redirect_request(req, *answer)
        token = req.unredirected_hdrs.get("Authorization")
        if new is not None and token and urlsplit(new.full_url)[:2] == urlsplit(req.full_url)[:2]:
            new.add_unredirected_header("Authorization", token)
        return new


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Return the system's certificates and, where installed, certifi's: Python on macOS may come with none itself."""
    context = ssl.create_default_context()
    try:
        import certifi
    except ImportError:
        return context
    context.load_verify_locations(certifi.where())
    return context


# ----- files ---------------------------------------------------------------------------------------------------------


def fetch(source: Remote, target: Path, report: Progress = lambda done, total: None) -> Path:
    """Download a file to `target`, which appears when it is complete and checked; return it.

    What has arrived stays in NAME.DIGEST.part, where no other file goes on, when the connection drops, the disk is full
    or Ctrl-C stops the process, and the next call resumes there. A dropped connection is tried again, with longer and
    longer pauses, until several attempts in a row bring nothing. A file that is there already is kept; its size alone
    is checked.

    Where another process downloads it just now, that is waited for. Raises InputError, one line, if the file cannot be
    had or is not what was expected (then nothing of it is kept), and if the disk is too small.
    """
    if _is_there(source, target):
        return target
    check_online(source.what, source.advice)
    digest = source.sha256 or source.sha1
    assert digest is not None
    with refusing(f"{target}: cannot be written", "choose another folder"), made_folder(target.parent):
        path = target.with_name(f"{target.name}.{digest[:12]}.part")
        with _locked(path, lambda size: report(size, source.size)) as file:
            if _is_there(source, target):  # by another process, meanwhile
                path.unlink()
                return target
            _bring(source, file, report)
            _check(source, file)
            os.replace(path, target)
            sync(target.parent)
    return target


def check_online(what: str, advice: str) -> None:
    """Check that HF_HUB_OFFLINE does not forbid downloads. Raises InputError."""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        raise InputError(f"{what}: HF_HUB_OFFLINE is set, so nothing is downloaded; {advice}")


def _is_there(source: Remote, target: Path) -> bool:
    refuse_irregular(target)
    if not target.exists():
        return False
    size = target.stat().st_size
    if source.size not in (None, size):
        raise InputError(f"{target}: {size} bytes; expected {source.size}: {source.what}; remove it, or move it away")
    return True


@contextlib.contextmanager
def _locked(part: Path, waiting: Callable[[int], None]) -> Iterator[IO[bytes]]:
    """Open a file for appending that no other process has open so: after that one, whose bytes are told meanwhile.

    Raises OSError and InputError.
    """
    while True:
        if part.is_symlink() or (part.exists() and not part.is_file()):  # a pipe would be waited for
            raise InputError(f"{part}: is a link, or not a regular file; remove it")
        with open(part, "ab") as file:
            if try_lock(file.fileno()) is not False and leads_to(part, file.fileno()):
                yield file
                return
            waiting(_size(file))
        time.sleep(WAIT_SECONDS)


def _size(file: IO[bytes]) -> int:
    return os.fstat(file.fileno()).st_size


def _bring(source: Remote, part: IO[bytes], report: Progress) -> None:
    """Download what is missing of a file. Raises InputError."""
    try:
        _with_patience(source, part, report)
    except (OSError, ValueError, http.client.HTTPException) as error:
        if isinstance(error, InputError):
            raise
        why, kept = f"{source.url}: {explained(error, source.token)}", ""
        if size := _size(part):
            kept = f"; {size / 1e6:,.1f} MB are kept, and the same command resumes there"
        else:
            Path(part.name).unlink(missing_ok=True)
        raise InputError(f"{source.what}: cannot be downloaded: {why}{kept}; {source.advice}") from error


def _with_patience(source: Remote, part: IO[bytes], report: Progress) -> None:
    """Download, with other attempts after what may pass. Raises what the last one raised."""
    idle = 0  # attempts in a row that brought nothing
    answered = False  # did the server ever bring a byte?
    while True:
        before = _size(part)
        try:
            return _append(source, part, report)
        except (OSError, http.client.HTTPException) as error:
            came = _size(part) > before
            answered, idle = answered or came, 1 if came else idle + 1
            again = answered or not isinstance(error, urllib.error.URLError)  # a server never reached is not there
            if isinstance(error, urllib.error.HTTPError):
                again = error.code in BUSY
            if idle > (len(PAUSES) if again else 0):
                raise
            seconds = PAUSES[idle - 1]
            print_error(f"note: {source.url}: {explained(error, source.token)}; trying again in {seconds:.0f} s")
            time.sleep(seconds)


def _append(source: Remote, part: IO[bytes], report: Progress) -> None:
    """Ask for what is missing, and append it. Raises OSError and HTTPException where not all of it came."""
    have = _size(part)
    have = have if have <= (source.size or have) else 0
    if have and have == source.size:
        return
    headers = {"Range": f"bytes={have}-"} if have else {}
    try:
        answer = _open(source.url, source.token, headers, STALL_SECONDS)
    except urllib.error.HTTPError as error:
        if error.code != 416:
            raise
        part.truncate(0)  # there is not so much of it
        raise ConnectionError("the server's file has become shorter") from error
    with answer:
        goes_on = answer.status == 206 and (answer.headers.get("Content-Range") or "").startswith(f"bytes {have}-")
        have = have if goes_on else 0
        length = answer.headers.get("Content-Length") or ""
        total = have + int(length) if length.isdecimal() else None
        if source.size is not None and total not in (None, source.size):
            # before what has arrived is let go: it may be an error's page
            raise ValueError(f"has {total} bytes; expected {source.size}")
        if not goes_on:
            part.truncate(0)
        _copy(answer, part, have, total or source.size, report)


def _copy(answer: http.client.HTTPResponse, part: IO[bytes], have: int, total: int | None, report: Progress) -> None:
    """Append an answer; what came before it stays if it is longer than `total`. Raises OSError and ValueError."""
    report(have, total)
    before = have
    while chunk := answer.read1(BLOCK_BYTES):
        if total is not None and have + len(chunk) > total:
            part.truncate(before)
            raise ValueError(f"sends more than the {total} bytes that were expected")
        with refusing(f"{part.name}: cannot be written", "free space, and the same command resumes there"):
            part.write(chunk)
            part.flush()
        have += len(chunk)
        report(have, total)
    if total is not None and have < total:
        raise ConnectionError(f"the connection dropped after {have} of {total} bytes")


def _check(source: Remote, part: IO[bytes]) -> None:
    """Check size and digest of a whole file, and see it to the disk; remove it if it is another. Raises InputError."""
    path, size = Path(part.name), _size(part)
    problem = f"; expected {source.size}" if source.size not in (None, size) else ""
    for name, expected in (("sha256", source.sha256), ("sha1", source.sha1)):
        if expected and not problem and (found := digest_of(path, name)) != expected:
            problem = f" with {name} {found[:16]}…; expected {expected[:16]}…"
    if problem:
        path.unlink()
        raise InputError(
            f"{source.what}: {source.url}: {size} bytes arrived{problem}; nothing is kept; {source.advice}"
        )
    os.fsync(part.fileno())


def digest_of(path: Path, name: str) -> str:
    """Return a file's sha256, or the sha1 that git calls it by, in hexadecimal. Raises OSError."""
    digest = hashlib.sha256() if name == "sha256" else hashlib.sha1(usedforsecurity=False)
    if name == "sha1":
        digest.update(f"blob {path.stat().st_size}\0".encode())
    with open(path, "rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


# ----- progress -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def shown(total: int) -> Iterator[Arrived]:
    """Show how much has arrived. total: bytes of the files."""
    sizes: dict[str, int] = {}
    with show_bytes(total or None) as update:

        def report(name: str, done: int, of: int | None) -> None:
            sizes[name] = done
            update(completed=sum(sizes.values()), description=name, total=total or of)

        yield report
