"""Downloads of files whose content is known beforehand, in bounded time.

Leaves out what is downloaded and where it is kept (tokenizers.py, corpora.py).
"""

import hashlib
import http.client
import ssl
import time
import urllib.error
import urllib.request

from llmc_jax.errors import InputError
from llmc_jax.files import reason

ANSWER_SECONDS = 10.0  # to connect, and between two pieces of the answer
DOWNLOAD_SECONDS = 120.0  # for the whole file
MAX_BYTES = 1 << 26


def download(url: str, sha256: str, what: str, advice: str) -> bytes:
    """Fetch a file of known content.

    what: the file in words; advice: what to do without it. Raises InputError with both if it does not arrive within
    DOWNLOAD_SECONDS, or is not the file that was expected.
    """
    try:
        data = _fetch(url)
    except (OSError, ValueError, http.client.HTTPException) as error:
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        raise InputError(f"{what}: {url}: cannot be downloaded ({reason(cause)}); {advice}") from error
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise InputError(
            f"{what}: {url}: {len(data)} bytes with sha256 {found[:16]}… arrived; expected {sha256[:16]}…; {advice}"
        )
    return data


def _fetch(url: str) -> bytes:
    deadline = time.monotonic() + DOWNLOAD_SECONDS
    data = bytearray()
    with urllib.request.urlopen(url, timeout=ANSWER_SECONDS, context=_certificates()) as answer:
        while chunk := answer.read(1 << 16):
            data += chunk
            if time.monotonic() > deadline or len(data) > MAX_BYTES:
                raise TimeoutError(f"stopped after {len(data)} bytes: too slow or too large")
    return bytes(data)


def _certificates() -> ssl.SSLContext:
    """Return the system's certificates and, where installed, certifi's: Python on macOS may come with none itself."""
    context = ssl.create_default_context()
    try:
        import certifi
    except ImportError:
        return context
    context.load_verify_locations(certifi.where())
    return context
