"""Files of data sets on Hugging Face at one revision: their addresses, sizes and digests.

$HF_ENDPOINT names another server with the same interface, $HF_TOKEN a login. Leaves out the download (download.py).
"""

import http.client
import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urljoin, urlsplit

from llmc_jax.base.errors import InputError
from llmc_jax.data.download import check_online, explained, read_all

ENDPOINT = "https://huggingface.co"
MAX_PAGES = 100  # of a listing, each of up to 1000 files


class File(NamedTuple):
    """A published file. name: what we call it. path: in the repository on Hugging Face. urls: where else its bytes are.

    size, and one of the digests: sha256, or git's sha1 of a small file; None where only the server tells them.
    """

    name: str
    size: int | None
    sha256: str | None
    path: str
    urls: tuple[str, ...] = ()
    sha1: str | None = None


def endpoint() -> str:
    """Return the server's address, without a slash at its end."""
    return (os.environ.get("HF_ENDPOINT") or ENDPOINT).rstrip("/")


def token() -> str | None:
    """Return the user's login: $HF_TOKEN, else what `hf auth login` has left in a file.

    Raises InputError for what no request can carry: http.client's own message would show all of it.
    """
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    kept = Path(os.environ.get("HF_TOKEN_PATH") or f"{home}/token").expanduser()
    where, own = "HF_TOKEN", os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN")
    if not own:
        where = str(kept)
        try:
            own = kept.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
    if re.fullmatch(r"[!-~]*", own := own.strip()) is None:
        raise InputError(f"{where}: is no login: expected one word, without white space; set it again, or unset it")
    return own or None


def file_url(repo: str, revision: str, path: str) -> str:
    """Return where a file of a data set is downloaded."""
    return f"{endpoint()}/datasets/{repo}/resolve/{quote(revision, safe='')}/{quote(path)}"


def list_files(repo: str, revision: str, folder: str, advice: str) -> list[File]:
    """Return the files right inside a folder of a data set, in the order of their paths. Raises InputError."""
    what = f"the list of files of {repo}"
    check_online(what, advice)
    url = f"{endpoint()}/api/datasets/{repo}/tree/{quote(revision, safe='')}/{quote(folder)}"
    own, found = token(), []
    for _ in range(MAX_PAGES):
        try:
            data, headers = read_all(url, own)
            found += [_entry(item) for item in json.loads(data) if item["type"] == "file"]
            following = _next_page(url, headers.get("Link") or "")
        except (OSError, http.client.HTTPException) as error:
            raise InputError(f"{what}: {url}: cannot be downloaded ({explained(error, own)}); {advice}") from error
        except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
            raise InputError(f"{what}: {url}: is no such list ({error!r}); {advice}") from error
        if following is None:
            return sorted(found, key=lambda file: file.path)
        url = following
    raise InputError(f"{what}: {url}: more than {MAX_PAGES} pages; {advice}")


def _entry(item: dict[str, Any]) -> File:
    """Return a file from the server's words. What they say first of a large one is about the pointer to it."""
    path, large = str(item["path"]), item.get("lfs")
    size, digest = int((large or item)["size"]), str((large or item)["oid"])
    if not (path.isprintable() and 0 <= size < 1 << 63):
        raise ValueError(f"{path!a}, {size} bytes"[:200])
    name = path.rpartition("/")[2]
    return File(name, size, digest if large else None, path, sha1=None if large else digest)


def _next_page(url: str, link: str) -> str | None:
    """Return the address of a listing's next page; None where this is the last. It is the same host's."""
    match = re.search(r'<([^>]+)>\s*;\s*rel="?next"?', link)
    if match is None:
        return None
    following = urljoin(url, match[1])
    if urlsplit(following)[:2] != urlsplit(url)[:2]:
        raise ValueError(f"its next page is on another host, {urlsplit(following).netloc}")
    return following
