"""The hub by itself: who is taken in, and who is not."""

import asyncio
import json
import socket
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc_jax.cluster.hub import ADDRESS_FILE, MOST_MEETINGS, SECRET, Address, Hub, own_addresses
from llmc_jax.cluster.launchers import Member
from llmc_jax.cluster.messages import (
    Beat,
    Hello,
    Link,
    Meet,
    Message,
    Met,
    Note,
    Refused,
    Verdict,
    Welcome,
    decode,
    encode,
)

hello = Hello(1, 3, "7", "", "host", 4)._replace
MEMBER = Member(0, 3, "127.0.0.1", 0, "test", "7")
TIMEOUT = 60.0
TOO_LONG = 120  # seconds, so that a mistake fails a test instead of holding it for ever


async def connected(hub: Hub) -> tuple[Link, asyncio.Task[None]]:
    ours, theirs = socket.socketpair()
    serving = asyncio.create_task(hub.serve(*await asyncio.open_connection(sock=theirs)))
    return Link(*await asyncio.open_connection(sock=ours)), serving


async def answer(hub: Hub, **fields: Any) -> Message | None:
    link, _ = await connected(hub)
    link.send(hello(**fields))
    return await link.receive()


strange = st.none() | st.integers() | st.floats() | st.text() | st.lists(st.none())
almost = st.dictionaries(st.sampled_from(Hello._fields), strange, min_size=1, max_size=3).map(
    lambda changed: encode(hello(token="x", job="another")._replace(**changed))
)


@given(st.lists(st.binary() | st.binary().map(lambda data: data + b"\n") | almost, min_size=1, max_size=3))
def test_whatever_a_stranger_sends_changes_nothing(data: list[bytes]) -> None:
    async def sent() -> None:
        hub = Hub(MEMBER, TIMEOUT)
        link, serving = await connected(hub)
        for part in data:
            link.send_bytes(part)
        link.close()
        await serving
        assert not (hub.peers or hub.links or hub.meetings or hub.verdict)
        assert await answer(hub) == Note("accepted")

    asyncio.run(sent())


def test_a_secret_keeps_strangers_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in the environment counts where no folder has a secret; `asked` comes from another environment."""

    async def asked(token: str) -> Any:
        hub = Hub(MEMBER, TIMEOUT)
        return type(await answer(hub, token=token)), hub.verdict

    monkeypatch.setenv(SECRET, "ours")
    for token, says in (("", Refused), ("theirs", Refused), ("ours", Note)):
        assert asyncio.run(asked(token)) == (says, None)


@pytest.mark.parametrize(
    "fields, says", [({"job": "8"}, Refused), ({"token": "a"}, Refused), ({"size": 4}, Verdict),
                     ({"rank": 3}, Verdict), ({"protocol": 0}, Verdict), ({"magic": "b"}, type(None))],
)  # fmt: skip
def test_who_does_not_belong_to_the_run(fields: dict[str, Any], says: type) -> None:
    async def asked() -> None:
        hub = Hub(MEMBER, TIMEOUT)
        assert type(await answer(hub, **fields)) is says
        assert not hub.peers and (hub.verdict is not None) == (says is Verdict)

    asyncio.run(asked())


async def met(hub: Hub, size: int) -> list[Link]:
    """Connections of all processes, which have come and heard so."""
    links = []
    for rank in range(size):
        link, _ = await connected(hub)
        link.send(hello(rank=rank, host=f"host{rank}"))
        links.append(link)
    for link in links:
        assert await says(link, Note)
        assert (await says(link, Welcome)).hosts == ("host0", "host1", "host2")
    return links


async def says[Kind](link: Link, kind: type[Kind]) -> Kind:
    async with asyncio.timeout(TOO_LONG):
        while message := await link.receive():
            if isinstance(message, kind):
                return message
    raise AssertionError(f"no {kind}")


def test_a_meeting_of_many_names_at_once() -> None:
    """Each rank comes to them in its own order."""

    async def together() -> None:
        hub = Hub(MEMBER, TIMEOUT)  # asyncio alone would let it go
        links = await met(hub, 3)
        for rank, link in enumerate(links):
            for name in ("a", "b", "c")[:: 1 if rank % 2 else -1]:
                link.send(Meet(name, [name, rank]))
        for link in links:
            messages = [await says(link, Met) for _ in range(3)]
            assert dict(messages) == {name: tuple([name, rank] for rank in range(3)) for name in ("a", "b", "c")}

    asyncio.run(together())


@pytest.mark.parametrize(("cause", "status"), [("failed", 75), ("refused", 2)])
def test_a_verdict_that_was_sent_has_its_causes_status(cause: str, status: int) -> None:
    found = decode(json.dumps({"is": "verdict", **Verdict(1, "host", 4, cause).fields, "status": 0}).encode())
    assert isinstance(found, Verdict) and found.status == found.fields["status"] == status


def test_a_rank_has_few_meetings_open() -> None:
    async def kept() -> None:
        hub = Hub(MEMBER, TIMEOUT)
        links = await met(hub, 3)
        for number in range(1000):
            links[1].send(Meet(f"{number}", "x" * 1000))
        assert (await says(links[0], Verdict)).rank == 1
        assert len(hub.meetings) == MOST_MEETINGS

    asyncio.run(kept())


def test_all_hear_the_last_beat_of_rank_0() -> None:
    async def told() -> None:
        hub = Hub(MEMBER, TIMEOUT)
        links = await met(hub, 3)
        links[0].send(Beat(6, "save", worker=5))
        while not hub.peers[0].worker:
            await asyncio.sleep(0)
        hub.tick()
        assert await says(links[2], Beat) == Beat(6, "save", worker=5)

    asyncio.run(told())


@pytest.mark.parametrize("message", [b"no message", b'{"is": "ended"}', encode(Beat(worker=-1)).strip()])
def test_a_process_that_sends_nonsense_counts_as_gone(message: bytes) -> None:
    async def sent() -> None:
        hub = Hub(MEMBER, TIMEOUT)  # asyncio alone would let it go
        links = await met(hub, 3)
        links[1].send_bytes(message + b"\n")
        found = await says(links[0], Verdict)
        assert (found.rank, found.cause) == (1, "gone")

    asyncio.run(sent())


def test_one_that_left_before_all_had_come_may_come_again() -> None:
    async def again() -> None:
        hub = Hub(MEMBER, TIMEOUT)
        link, serving = await connected(hub)
        link.send(hello())
        assert await says(link, Note)
        link.close()
        await serving
        await met(hub, 3)
        assert hub.verdict is None

    asyncio.run(again())


half_addresses = st.dictionaries(st.sampled_from(Address._fields), strange).map(lambda half: json.dumps(half).encode())


@given(st.binary(max_size=50) | half_addresses)
def test_a_file_that_holds_no_address(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert Address.read(Path(folder)) is None
        Path(folder, ADDRESS_FILE).write_bytes(content)
        found = Address.read(Path(folder))
        assert found is None or isinstance(found.port, int)


def test_own_addresses_are_not_this_machine_s_alone() -> None:
    assert own_addresses()[0] == socket.gethostname()
    assert not any(address.startswith("127.") for address in own_addresses())
