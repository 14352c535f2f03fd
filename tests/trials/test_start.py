"""A check before a run: the card, its cache and lock, processes that go wrong, and that a CPU notices nothing of it."""

import errno
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import pytest

from llmc_jax.kernels import Finding, Findings
from llmc_jax.kernels.choice import implementations
from llmc_jax.machine import driver
from llmc_jax.machine.driver import Card
from llmc_jax.trials import candidates, children, known, start
from tests.trials.test_check import D12, TINY

ROOT = Path(__file__).resolve().parents[2]
H200 = Card("NVIDIA H200", "0123456789abcdef0123456789abcdef", "9.0", 150_000_000_000, "580.1", "0000:65:00.0")
REAL_KILL = children.Child.kill
FOUND = Findings(found=(Finding("gelu", "pallas"),), notes=("a note",))

# Stands for check.py: all is right, or there is no card, or every implementation ends its process.
FAKE = """
import os
from llmc_jax.trials.children import NotMeasured, Tried
def measure(what, case, finding=None, chosen=None, options=(), beside=()):
    if what == "device":
        if os.environ.get("BAD") == "no card":
            raise NotMeasured("JAX computes on cpu there")
        return Tried()
    if what == "step":
        return Tried("", 0.1 if chosen else 0.2)
    if os.environ["BAD"] == "all":
        os.abort()
    return Tried()
"""


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines = list[str]()
    monkeypatch.setattr(start, "print_error", lines.append)
    return lines


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fake")
    folder.joinpath("fake_check.py").write_text(FAKE)
    return folder


@pytest.fixture
def find_out(
    module: Path, tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Findings]]:
    """A check with the module above, a cache of its own, and a free card."""
    monkeypatch.setenv("LLMC_JAX_CACHE", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(module))
    monkeypatch.setattr(start, "MODULE", "fake_check")
    monkeypatch.setitem(start.LIMITS, "kernel", 1.0)
    monkeypatch.setattr(children, "START_SECONDS", 10.0)
    monkeypatch.setattr(driver, "jax_has_begun", lambda: False)
    monkeypatch.setattr(driver, "busy", lambda _: "")
    monkeypatch.setattr(start, "PAUSE", 0.0)

    def run(bad: str = "", here: Card = H200, **more: Any) -> Findings:
        monkeypatch.setenv("BAD", bad)
        return start.find_out(D12, here, **more)

    yield run


def test_a_check_and_what_is_kept(find_out: Callable[..., Findings], said: list[str], tmp_path: Path) -> None:
    first = find_out()
    assert first.fastest and not first.notes
    assert any("at most" in line for line in said) and any("1/" in line for line in said)
    assert {path.suffix for path in tmp_path.glob("kernels/*")} == {".json", ".lock"}
    said.clear()
    assert find_out(bad="all") == first and not said  # no process, no word
    assert find_out(bad="", again=True) == first and said
    (one,) = known.all_known()
    assert one.facts["card"] == "NVIDIA H200" and H200.uuid not in json.dumps(one.facts)
    assert known.clear() == 1 and known.all_known() == []


@pytest.mark.slow
def test_processes_that_do_not_get_the_card_say_nothing_of_kernels(find_out: Callable[..., Findings]) -> None:
    found = find_out(bad="no card")
    assert not found.found and len(found.notes) == 1
    assert known.all_known() == []
    assert find_out().fastest  # with the card


@pytest.mark.slow
def test_with_kernels(tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it with interpreted kernels: one that is right, one that there is not, and a whole step."""
    monkeypatch.setenv("LLMC_JAX_CACHE", str(tmp_path))
    monkeypatch.setattr(driver, "jax_has_begun", lambda: False)
    monkeypatch.setattr(driver, "busy", lambda _: "")
    rows = {name: list(implementations(name).values()) for name in ("gelu", "layernorm")}
    absent = rows["layernorm"][0]._replace(name="no such kernel")
    groups = {"gelu": rows["gelu"][:2], "layernorm": [absent, rows["layernorm"][1]]}
    monkeypatch.setattr(candidates, "by_operation", lambda _: groups)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    found = start.find_out(TINY, H200, seconds=300.0)
    assert not found.notes and {each.label for each in found.found if each.problem} == {"layernorm: no such kernel"}
    assert len(found.found) == 2 and dict(found.fastest)["layernorm"] == "xla"
    assert [name for name, _ in found.steps] == ["xla", "the kernels"]


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process is begun: what a search finds is known."""
    monkeypatch.setattr(start, "_searched", lambda *_: FOUND)


@pytest.mark.usefixtures("searched")
def test_what_is_known_stays_where_nothing_can_be_tried(
    find_out: Callable[..., Findings], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_out() == FOUND
    with monkeypatch.context() as patch:
        patch.setattr(driver, "busy", lambda _: "other processes use the card (17)")
        assert len(find_out(again=True).notes) == 1
    assert find_out() == FOUND and len(known.all_known()) == 1


def test_time_is_kept(find_out: Callable[..., Findings]) -> None:
    found = find_out(seconds=0.0)
    assert found == Findings(notes=found.notes) and len(found.notes) == 1
    assert find_out() == found  # it is not repeated


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_check_that_ends_with_an_error_is_begun_again(
    error: type[BaseException], find_out: Callable[..., Findings], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> NoReturn:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(start, "_searched", fails)
        with pytest.raises(error):
            find_out()
    assert not known.all_known()
    monkeypatch.setattr(start, "_searched", lambda *_: FOUND)
    assert find_out() == FOUND and known.all_known()


@pytest.mark.usefixtures("searched")
def test_neither_a_card_that_becomes_free_nor_a_lock_that_fails_keeps_from_a_check(
    find_out: Callable[..., Findings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a start that was killed, whose process was still there; and where there can be no lock."""

    def fails(*_: Any) -> NoReturn:
        raise OSError(errno.EIO, "")

    looks = iter(["other processes use the card (17)"] * 2)
    monkeypatch.setattr(driver, "busy", lambda _: next(looks, ""))
    assert find_out() == FOUND
    monkeypatch.setattr(fcntl, "flock", fails)
    assert find_out(again=True) == FOUND


def test_processes_that_may_be_killed_do_not_write_into_the_cache_of_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMC_JAX_CACHE", str(tmp_path))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    assert start.child_environment()["JAX_COMPILATION_CACHE_DIR"] != str(tmp_path / "xla")


@pytest.mark.parametrize("what", ["busy", "begun", "locked", "stuck"])
def test_what_means_the_shipped_table(
    what: str, find_out: Callable[..., Findings], monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = known.locked(H200) if what == "locked" else nullcontext()
    if what == "busy":
        monkeypatch.setattr(driver, "busy", lambda _: "other processes use the card (17)")
    elif what == "begun":
        monkeypatch.setattr(driver, "jax_has_begun", lambda: True)
    elif what == "stuck":
        monkeypatch.setattr(children.Child, "kill", lambda self, _: not REAL_KILL(self))
    with lock:
        found = find_out(bad="all")
    assert not found.found and len(found.notes) == 1 and "as shipped" in found.notes[0]
    assert not any(each.found.found for each in known.all_known())


def test_another_combination_is_another_file(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = known.facts_of(D12, H200)
    others = [
        known.facts_of(D12._replace(batch_size=32), H200),
        known.facts_of(D12._replace(dtype="fp16"), H200),
        known.facts_of(D12._replace(options=(("xla_gpu_enable_triton_gemm", False),)), H200),
        known.facts_of(D12, H200._replace(driver="581")),
        known.facts_of(D12, H200._replace(name="NVIDIA H200 MIG 1g.18gb")),
    ]
    monkeypatch.setattr(known, "sources_digest", lambda: "other")
    others.append(known.facts_of(D12, H200))
    assert len({known.file_of(each) for each in (facts, *others)}) == 7
    assert known.facts_of(D12, H200._replace(uuid="f" * 32)) == others[-1]


@pytest.mark.parametrize("content", [
    b"", b"{", b"[1]", b'{"facts": {}}', b"\xff\xfe", b'{"facts": 1, "found": 2, "date": 3}', b"[" * 100_000,
    b'{"facts": {}, "found": {"found": [], "starts": 1, "complete": true}, "date": "2026-11-01"}',
])  # fmt: skip
@pytest.mark.usefixtures("searched")
def test_a_damaged_file_is_a_miss(content: bytes, find_out: Callable[..., Findings], said: list[str]) -> None:
    assert find_out() == FOUND and said
    said.clear()
    assert find_out() == FOUND and not said
    known.file_of(known.facts_of(D12, H200)).write_bytes(content)
    assert known.all_known() == []
    assert find_out() == FOUND and len(said) == 1 and len(known.all_known()) == 1


@pytest.mark.usefixtures("searched")
def test_a_cache_that_cannot_be_written(
    find_out: Callable[..., Findings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LLMC_JAX_CACHE", str(tmp_path / "file"))
    assert find_out() == FOUND
    with known.locked(H200) as free:
        assert free


# ----- the card -----------------------------------------------------------------------------------------------------


class Driver:
    """libcuda of a machine with some GPUs of a kind."""

    def __init__(self, status: int = 0, gpus: int = 1) -> None:
        self.status, self.gpus = status, gpus

    def cuInit(self, _: int) -> int:
        return self.status

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self.gpus
        return 0

    def cuDeviceGet(self, device: Any, number: int) -> int:
        device._obj.value = 70 + number  # a handle need not be the number
        return 0

    def cuDeviceGetPCIBusId(self, name: Any, length: int, device: Any) -> int:
        name.value = b"0000:65:00.0" if device.value == 70 else b"0000:17:00.0"
        return 0

    def cuDeviceGetName(self, name: Any, length: int, device: Any) -> int:
        name.value = b"NVIDIA H200"
        return 0

    def cuDeviceGetUuid_v2(self, uuid: Any, device: Any) -> int:
        uuid.raw = bytes([*bytes.fromhex(H200.uuid)[:-1], device.value - 70 + 0xEF])
        return 0

    def cuDeviceTotalMem_v2(self, memory: Any, device: Any) -> int:
        memory._obj.value = H200.memory
        return 0

    def cuDeviceGetAttribute(self, number: Any, attribute: int, device: Any) -> int:
        number._obj.value = {driver.MAJOR: 9, driver.MINOR: 0}[attribute]
        return 0


def test_the_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "DRIVER_VERSION", tmp_path / "version")
    (tmp_path / "version").write_text("580.1\n")
    assert driver.seen_cards(Driver()) == [H200]
    assert H200.machine.target == "sm_90"
    seen = driver.seen_cards(Driver(gpus=8))
    assert len({each.uuid for each in seen}) == 8 and [each.pci[5:7] for each in seen[:2]] == ["65", "17"]
    assert driver.seen_cards(Driver(status=100)) == driver.seen_cards(object()) == []


def test_whether_others_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(said: str, card: Card = H200) -> str:
        monkeypatch.setattr(driver, "output_of", lambda *words, seconds: said if words[2] == H200.pci else "1, 2")
        return driver.busy(card)

    assert busy("140000, 143000\n") == "" == busy("") == busy("[N/A], [N/A]")
    assert "9000 of 143000" in busy("9000, 143000\n")
    assert busy("1, 2", H200._replace(name="NVIDIA H200 MIG 1g.18gb")) == ""


IN_ORDER = """
import sys
from llmc_jax.run import prepare
from llmc_jax.config.train import TrainConfig
from llmc_jax.kernels import Findings
from llmc_jax.machine import driver as card
from llmc_jax.trials import candidates, here, start
shape = {"model": "L1-NH2-C64-V256-T32", "batch_size": 1, "sequence_length": 16}
config = TrainConfig(**shape, max_steps=0, val_every=0, sample_every=0)
assert card.seen_cards() == [] and not card.jax_has_begun()
seen = []
def find_out(case, here, **_):
    seen.append((case.machine.kind, card.jax_has_begun()))
    return Findings(notes=("said",))
start.find_out = find_out
H200 = card.Card("NVIDIA H200", "0" * 32, "9.0", 10**11, "580", "0000:65:00.0")
here.seen_cards = lambda: [H200]
made, _ = prepare.prepare(config, [])
assert seen == [("NVIDIA H200", False)] and card.jax_has_begun(), seen
assert "said" in made.notes
here.try_kernels(TrainConfig(**{**config.__dict__, "no_kernel_check": True}), made.model)
assert len(seen) == 1
print("in order")
"""


@pytest.mark.slow
def test_it_comes_before_jax_has_a_device(tmp_path: Path) -> None:
    """And on a CPU it leaves nothing, not even a folder."""
    environment = dict(os.environ, JAX_PLATFORMS="cpu", LLMC_JAX_CACHE=str(tmp_path), PYTHONPATH=str(ROOT))
    done = subprocess.run(
        [sys.executable, "-c", IN_ORDER], capture_output=True, text=True, env=environment, cwd=tmp_path, check=False
    )
    assert done.stdout == "in order\n", done.stderr
    assert not (tmp_path / "kernels").exists()
