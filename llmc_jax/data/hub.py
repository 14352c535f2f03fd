"""Files of data sets and models on Hugging Face at one revision: their addresses, sizes and digests.

A repository is OWNER/NAME, of a data set datasets/OWNER/NAME. $HF_ENDPOINT names another server with the same
interface, $HF_TOKEN a login. Leaves out the download (download.py).
"""

import http.client
import json
import os
import re
from collections.abc import Callable
from email.message import Message
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urljoin, urlsplit

from llmc_jax.base.errors import InputError
from llmc_jax.data.download import check_online, explained, read_all

ENDPOINT = "https://huggingface.co"
MAX_PAGES = 100  # of a listing, each of up to 1000 files


class File(NamedTuple):
    """A published file. name: what we call it. path: in the repository on Hugging Face. url: of one that is not there.

    size, and one of the digests: sha256, or git's sha1 of a small file; None where only the server tells them.
    """

    name: str
    size: int | None
    sha256: str | None
    path: str
    url: str = ""
    sha1: str | None = None


def endpoint() -> str:
    """Return the server's address, without a slash at its end."""
    return (os.environ.get("HF_ENDPOINT") or ENDPOINT).rstrip("/")


def home() -> Path:
    """Return the folder in which Hugging Face's programs keep what they know and have downloaded."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or f"{cache}/huggingface").expanduser()


def token() -> str | None:
    """Return the user's login: $HF_TOKEN, else what `hf auth login` has left in a file.

    Raises InputError for what no request can carry: http.client's own message would show all of it.
    """
    kept = Path(os.environ.get("HF_TOKEN_PATH") or home() / "token").expanduser()
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
    """Return where a file is downloaded."""
    return f"{endpoint()}/{repo}/resolve/{quote(revision, safe='')}/{quote(path)}"


def commit_of(repo: str, revision: str, advice: str) -> str:
    """Return the commit that a branch or tag is now, 40 hexadecimal digits. Raises InputError."""
    answer, _ = _asked(f"the revision {revision} of {repo}", _api(repo, "revision", revision), advice, _commit)
    return answer


def list_files(repo: str, revision: str, folder: str, advice: str) -> list[File]:
    """Return the files right inside a folder, "" for the uppermost, in the order of their paths. Raises InputError."""
    what, url, found = f"the list of files of {repo}", _api(repo, "tree", revision, folder), list[File]()
    for _ in range(MAX_PAGES):
        files, following = _asked(
            what, url, advice, lambda answer: [_entry(each) for each in answer if each["type"] == "file"]
        )
        found += files
        if following is None:
            return sorted(found, key=lambda file: file.path)
        url = following
    raise InputError(f"{what}: {url}: more than {MAX_PAGES} pages; {advice}")


def _api(repo: str, question: str, revision: str, folder: str = "") -> str:
    kind = repo if repo.startswith("datasets/") else f"models/{repo}"
    return f"{endpoint()}/api/{kind}/{question}/{quote(revision, safe='')}" + (folder and f"/{quote(folder)}")


def _asked[T](what: str, url: str, advice: str, read: Callable[[Any], T]) -> tuple[T, str | None]:
    """Return what is read out of the server's answer, and the address at which it goes on. Raises InputError."""
    check_online(what, advice)
    own = token()
    try:
        data, headers = read_all(url, own)
        return read(json.loads(data)), _next_page(url, headers)
    except (OSError, http.client.HTTPException) as error:
        raise InputError(f"{what}: {url}: cannot be downloaded ({explained(error, own)}); {advice}") from error
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
        raise InputError(f"{what}: {url}: is no such list ({error!r}); {advice}") from error


def _commit(answer: Any) -> str:
    if re.fullmatch(r"[0-9a-f]{40}", answer["sha"]) is None:
        raise ValueError(f"commit {answer['sha']!a}"[:200])
    return str(answer["sha"])


def _entry(item: dict[str, Any]) -> File:
    """Return a file from the server's words. What they say first of a large one is about the pointer to it."""
    path, large = str(item["path"]), item.get("lfs")
    size, digest = int((large or item)["size"]), str((large or item)["oid"])
    if not (path.isprintable() and 0 <= size < 1 << 63):
        raise ValueError(f"{path!a}, {size} bytes"[:200])
    name = path.rpartition("/")[2]
    return File(name, size, digest if large else None, path, sha1=None if large else digest)


def _next_page(url: str, headers: Message) -> str | None:
    """Return the address of a listing's next page; None where this is the last. It is the same host's."""
    match = re.search(r'<([^>]+)>\s*;\s*rel="?next"?', headers.get("Link") or "")
    if match is None:
        return None
    following = urljoin(url, match[1])
    if urlsplit(following)[:2] != urlsplit(url)[:2]:
        raise ValueError(f"its next page is on another host, {urlsplit(following).netloc}")
    return following
