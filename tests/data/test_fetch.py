"""Large downloads from a server on this machine: resumed, tried again, verified; and lists of files as the Hub's."""

import hashlib
import os
import shutil
import threading
import urllib.error
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmc_jax.base.errors import InputError
from llmc_jax.base.files import try_lock
from llmc_jax.data import download as module
from llmc_jax.data import hub
from llmc_jax.data.download import Remote, fetch
from tests.data.server import Files, serving

DATA = bytes(index * 7 % 251 for index in range(100_000))
SHA256 = hashlib.sha256(DATA).hexdigest()
PART = f"f.{SHA256[:12]}.part"
SHA1 = hashlib.sha1(b"blob 100000\0" + DATA).hexdigest()


@pytest.fixture
def server(server: Files) -> Files:
    server.content["/f"] = DATA
    return server


def remote(server: Files, path: str = "/f", **known: object) -> Remote:
    return Remote(f"{server.address}{path}", "it", "ask for it", **({"sha256": SHA256} | known))  # type: ignore[arg-type]


def names(folder: str = ".") -> list[str]:
    return sorted(os.listdir(folder))


def test_a_file_arrives_once(server: Files) -> None:
    told: list[tuple[int, int | None]] = []
    source = remote(server, size=len(DATA))
    path = fetch(source, Path("new/f"), lambda done, total: told.append((done, total)))
    assert path.read_bytes() == DATA and names("new") == ["f"]
    assert (told[0], told[-1]) == ((0, len(DATA)), (len(DATA), len(DATA)))
    assert fetch(source, path) == path
    assert len(server.asked) == 1


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    drops=st.lists(st.integers(0, 40_000), max_size=6), known=st.sampled_from(["sha256", "sha1"]), ranges=st.booleans()
)
def test_wherever_it_breaks_off_the_whole_file_arrives(
    server: Files, drops: list[int], known: str, ranges: bool
) -> None:
    server.asked.clear()
    server.drops["/f"], server.ranges = [*drops], ranges
    source = remote(server) if known == "sha256" else remote(server, sha256=None, sha1=SHA1)
    shutil.rmtree("new", ignore_errors=True)
    for _ in range(10):  # several attempts in a row that bring nothing end a call
        try:
            fetch(source, Path("new/f"))
            break
        except InputError:
            assert drops
    assert Path("new/f").read_bytes() == DATA and names("new") == ["f"]
    if ranges and all(drops):
        starts = [0, *[sum(drops[: index + 1]) for index in range(len(drops))]]
        expected = [f"bytes={start}-" if start else None for start in starts if start < len(DATA)]
        assert [asked.range for asked in server.asked][: len(expected)] == expected


def test_what_has_arrived_is_kept_and_the_next_call_goes_on(server: Files) -> None:
    server.drops["/f"] = [60_000, 0, 0, 0, 0]
    source = remote(server, size=len(DATA))
    with pytest.raises(InputError, match=r"0\.1 MB are kept"):
        fetch(source, Path("f"))
    assert Path(PART).read_bytes() == DATA[:60_000]
    server.asked.clear()
    server.drops.clear()
    assert fetch(source, Path("f")).read_bytes() == DATA
    assert [asked.range for asked in server.asked] == ["bytes=60000-"]


@pytest.mark.parametrize(
    ("left", "known", "asked"),
    [
        (b"", {"size": len(DATA)}, [None]),
        (b"another file, longer than this one" * 10_000, {"size": len(DATA)}, [None]),
        (DATA, {"size": len(DATA)}, []),  # complete: it is only checked
        (DATA + DATA, {}, ["bytes=200000-", None]),  # the server's has become shorter
    ],
)
def test_a_part_is_gone_on_with_where_it_is_of_this_file(
    server: Files, left: bytes, known: dict[str, int], asked: list[str | None]
) -> None:
    Path(f"f.{'0' * 12}.part").write_bytes(b"of another digest")
    Path(PART).write_bytes(left)
    assert fetch(remote(server, **known), Path("f")).read_bytes() == DATA
    assert [each.range for each in server.asked] == asked
    assert names() == ["f", f"f.{'0' * 12}.part"]


def test_an_address_with_another_file_does_not_cost_what_has_arrived(server: Files) -> None:
    Path(PART).write_bytes(DATA[:1000])
    server.content["/moved"] = b"This site is closed"
    server.ranges = False
    source = remote(server, "/moved", size=len(DATA))
    with pytest.raises(InputError, match="has 19 bytes"):
        fetch(source, Path("f"))
    assert Path(PART).read_bytes() == DATA[:1000]
    server.content["/moved"] = DATA
    assert fetch(source, Path("f")).read_bytes() == DATA


@pytest.mark.parametrize(
    ("known", "message"),
    [
        ({"size": 99_999}, "has 100000 bytes; expected 99999; ask for it"),
        ({"sha256": "0" * 64}, r"expected 0000000000000000…; nothing is kept; ask for it"),
        ({"sha1": "0" * 40}, r"with sha1 .* expected 0000000000000000…"),
    ],
)
def test_another_file_is_refused_and_not_kept(server: Files, known: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        fetch(remote(server, **known), Path("f"))
    assert "\n" not in str(caught.value) and names() == []


@pytest.mark.parametrize("have", [0, 1000])
def test_no_more_is_written_than_was_expected(server: Files, have: int) -> None:
    server.lengths = False
    if have:
        Path(PART).write_bytes(DATA[:have])
    server.content["/endless"] = DATA * 100
    told: list[int] = []
    source = remote(server, "/endless", size=len(DATA))
    with pytest.raises(InputError, match="more than the 100000 bytes"):
        fetch(source, Path("f"), lambda done, total: told.append(done))
    assert max(told) <= len(DATA)
    assert {path.name: path.stat().st_size for path in Path().glob("*.part")} == ({PART: have} if have else {})
    assert fetch(remote(server, size=len(DATA)), Path("f")).read_bytes() == DATA


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_what_stands_in_a_parts_place_is_neither_waited_for_nor_written_to(server: Files, kind: str) -> None:
    Path("mine").write_bytes(b"mine")
    if kind == "pipe":
        os.mkfifo(PART)
    else:
        Path(PART).symlink_to(Path("mine"))
    said: list[str] = []

    def call() -> None:
        try:
            fetch(remote(server), Path("f"))
        except InputError as error:
            said.append(str(error))

    thread = threading.Thread(target=call, daemon=True)  # at a pipe it would wait for good
    thread.start()
    thread.join(10.0)
    assert [line.partition(",")[0] for line in said] == [f"{PART}: is a link"]
    assert Path("mine").read_bytes() == b"mine" and server.asked == []


@pytest.mark.parametrize(("code", "asks"), [(404, 1), (401, 1), (403, 1), (451, 1), (503, 4)])
def test_a_server_that_refuses(server: Files, code: int, asks: int) -> None:
    server.status["/f"] = [code] * 10
    with pytest.raises(InputError, match=rf"/f: the server answers {code} .*; ask for it"):
        fetch(remote(server), Path("f"))
    assert (len(server.asked), names()) == (asks, [])


def test_a_token_stays_with_its_host(server: Files) -> None:
    with serving() as other:
        other.content["/signed"] = DATA
        server.redirects = {"/a": "/b", "/b": f"{other.address}/signed"}
        fetch(remote(server, "/a", token="secret"), Path("f"))
        assert [asked.token for asked in server.asked] == ["Bearer secret"] * 2
        assert [asked.token for asked in other.asked] == [None]


@pytest.mark.parametrize("error", [ConnectionRefusedError(111, "refused"), OSError(-2, "Name or service not known")])
def test_without_a_server_there_is_one_attempt(monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    def fail(*_: object) -> None:
        raise urllib.error.URLError(error)

    slept: list[float] = []
    monkeypatch.setattr(module.time, "sleep", slept.append)
    monkeypatch.setattr(module, "_open", fail)
    with pytest.raises(InputError, match=r"it: cannot be downloaded: http://x/f: .*; ask for it"):
        fetch(Remote("http://x/f", "it", "ask for it", sha256=SHA256), Path("f"))
    assert slept == names() == []


def test_hf_hub_offline(server: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for call in (lambda: fetch(remote(server), Path("f")), lambda: hub.list_files("a/b", "r", "", "ask")):
        with pytest.raises(InputError, match="HF_HUB_OFFLINE"):
            call()
    assert server.asked == []


def test_a_full_disk_keeps_what_has_arrived(server: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    full = open("/dev/full", "wb", buffering=0)  # noqa: SIM115  as long as the test
    copy = module._copy

    def copy_to_it(answer: Any, part: Any, *more: Any) -> None:
        copy(answer, SimpleNamespace(name=part.name, write=full.write, flush=full.flush), *more)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "_copy", copy_to_it)
    with pytest.raises(InputError, match="No space left on device"):
        fetch(remote(server), Path("f"))


@pytest.mark.parametrize("ends", ["done", "killed"])
def test_another_process_is_waited_for(server: Files, ends: str) -> None:
    other = open(Path(PART), "ab")  # noqa: SIM115  as long as the other process lives
    assert try_lock(other.fileno())
    told: list[int] = []

    def go_on(done: int, total: int | None) -> None:
        told.append(done)
        if not other.closed:
            other.write(DATA[:1000] if ends == "killed" else DATA)
            other.flush()
            if ends == "done":
                os.replace(Path(PART), Path("f"))
            other.close()

    assert fetch(remote(server, size=len(DATA)), Path("f"), go_on).read_bytes() == DATA
    assert told[0] == 0 and names() == ["f"]
    assert [asked.range for asked in server.asked] == ["bytes=1000-"] * (ends == "killed")


def test_ctrl_c_keeps_what_has_arrived(server: Files) -> None:
    def stop(done: int, total: int | None) -> None:
        if done:
            raise KeyboardInterrupt

    source = remote(server, size=len(DATA))
    with pytest.raises(KeyboardInterrupt):
        fetch(source, Path("f"), stop)
    have = Path(PART).stat().st_size
    assert have > 0 and fetch(source, Path("f")).read_bytes() == DATA
    assert server.asked[-1].range == (f"bytes={have}-" if have < len(DATA) else None)


def test_a_file_that_is_there_with_another_size_is_not_replaced(server: Files) -> None:
    Path("f").write_bytes(b"mine")
    with pytest.raises(InputError, match="4 bytes; expected 100000"):
        fetch(remote(server, size=len(DATA)), Path("f"))
    assert Path("f").read_bytes() == b"mine"


@pytest.fixture
def tree(server: Files, monkeypatch: pytest.MonkeyPatch) -> Files:
    """A listing of two pages, of a small file, a large one and a folder."""
    monkeypatch.setenv("HF_ENDPOINT", f"{server.address}/")
    monkeypatch.setenv("HF_TOKEN", "secret")
    small = {"type": "file", "path": "d/b.txt", "size": 5, "oid": "11"}
    large = {
        "type": "file",
        "path": "d/a",
        "size": 130,
        "oid": "22",
        "lfs": {"oid": "33", "size": 7, "pointerSize": 130},
    }
    folder = {"type": "directory", "path": "d/c", "size": 0, "oid": "44"}
    server.listings["/api/datasets/own/er/tree/main/d"] = ([small], "/api/page2?cursor=x")
    server.listings["/api/page2?cursor=x"] = ([large, folder], None)
    return server


def test_a_list_of_files(tree: Files) -> None:
    files = [hub.File("a", 7, "33", "d/a"), hub.File("b.txt", 5, None, "d/b.txt", sha1="11")]
    assert hub.list_files("datasets/own/er", "main", "d", "ask") == files
    assert {asked.token for asked in tree.asked} == {"Bearer secret"}
    url = f"{tree.address}/datasets/own/er/resolve/a%2Fb/d/%C3%A9.txt"
    assert hub.file_url("datasets/own/er", "a/b", "d/é.txt") == url


@pytest.mark.parametrize("following", ["http://elsewhere.example/x", "https://127.0.0.1/x"])
def test_a_list_does_not_go_on_elsewhere(tree: Files, following: str) -> None:
    tree.listings["/api/datasets/own/er/tree/main/d"] = ([], following)
    with pytest.raises(InputError, match="another host"):
        hub.list_files("datasets/own/er", "main", "d", "ask")


@pytest.mark.parametrize(
    "entries",
    [
        [{"type": "file"}],
        [3],
        [{"type": "file", "path": "a", "size": "x", "oid": ""}],
        [{"type": "file", "path": "d/\x1b]0;a\x07.parquet", "size": 5, "oid": ""}],
        [{"type": "file", "path": "a", "size": 10**400, "oid": ""}],
        [{"type": "file", "path": "a", "size": float("inf"), "oid": ""}],
        [{"type": "file", "path": "a", "size": -1, "oid": ""}],
    ],
)
def test_what_is_no_list_is_refused(tree: Files, entries: list[object]) -> None:
    tree.listings["/api/datasets/own/er/tree/main/d"] = (entries, None)
    with pytest.raises(InputError, match="is no such list") as caught:
        hub.list_files("datasets/own/er", "main", "d", "ask")
    assert str(caught.value).isprintable()


def test_a_token_comes_from_the_environment_or_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert hub.token() is None
    Path("token").write_text("kept\n")
    assert hub.token() == "kept"
    monkeypatch.setenv("HF_TOKEN", "own")
    assert hub.token() == "own"


@pytest.mark.parametrize("login", ["hf_secret\nsecond line", "hf_secret more", "hf_secret\u2026"])
def test_a_login_that_no_request_can_carry_is_not_shown(
    server: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, login: str
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    Path("token").write_text(login)
    for words in ("token: is no login", "HF_TOKEN: is no login"):
        with pytest.raises(InputError, match=words) as caught:
            hub.list_files("datasets/own/er", "main", "d", "ask")
        assert "secret" not in str(caught.value)
        monkeypatch.setenv("HF_TOKEN", login)
    assert server.asked == []
