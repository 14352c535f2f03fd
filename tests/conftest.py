"""Fixtures that every test may use."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from llmc_jax.data.tokenfile import write_token_file
from tests.drawing import Beside

# Interpreted kernels of several warpgroups need more threads than a small machine has cores (mosaic.py), or wait for
# ever. XLA splits sums among its threads: with as many everywhere the bits are the same. Read when JAX begins.
os.environ.setdefault("NPROC", "8")
os.environ.pop("UV_RUN_RECURSION_DEPTH", None)  # or programs would call themselves `uv run …` under `uv run pytest`
# No test fails because the machine is busy: time is never what is tested.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

SHARED = Path(__file__).resolve().parents[2] / "shared"


# They take longest. At the end of a run one worker would make them while the other has nothing left to do.
FIRST = ("tests/test_demo.py", "tests/training/parallel/test_spread.py", "tests/run/test_devices.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    words = "make a quarter of the examples of each property"
    parser.addoption("--quick", action="store_true", help=words)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the longest tests first; with --quick, make a quarter of the examples that each property asks for."""
    items.sort(key=lambda item: not item.nodeid.startswith(FIRST))  # the others keep their order
    if config.getoption("--quick"):
        for function in {item.function for item in items if isinstance(item, pytest.Function)}:
            # No profile changes what a test's own @settings says, and no second @settings may be put on it.
            if asked := getattr(function, "_hypothesis_internal_use_settings", None):
                function._hypothesis_internal_use_settings = settings(asked, max_examples=asked.max_examples // 4 + 1)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of large reference files beside the repository; tests that need it are skipped where it is missing."""
    if not SHARED.is_dir():
        pytest.skip("the reference files (../shared) are not beside this clone")
    return SHARED


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or fills this machine's caches (compiled programs, the built-in corpus); they share a new one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMC_JAX_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("LLMC_JAX_REPORT", "0")  # a page of each run would be half a second for nothing
        patch.setattr(Beside, "_begun", lambda *_: None)  # and the process that draws its picture two
        yield


@pytest.fixture(scope="module")
def quick_compilation() -> Iterator[None]:
    """Half the time to compile: for tests that compare numbers of small programs of their own with others'.

    What LLVM optimises less is XLA's fused loops; what XLA itself does is the same.
    """
    import jax  # here, because some tests do without

    before = jax.config.read("jax_disable_most_optimizations")
    jax.clear_caches()  # a program that was compiled the other way is found there, and makes other bits
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
    jax.clear_caches()


@pytest.fixture(scope="module")
def nothing_lasts() -> Iterator[None]:
    """Nothing here outlives the machine: what is written need not reach the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture
def op_by_op() -> Iterator[None]:
    """Each primitive compiled by itself, once for all tests: compiling the operations anew takes seconds."""
    import jax

    with jax.disable_jit():
        yield


@pytest.fixture(scope="session", autouse=True)
def _heard_signals() -> Iterator[None]:
    """Ctrl-C and SIGHUP work in the tests and the programs they start, even where a shell that put them in the
    background, or nohup, has switched them off.
    """
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    switched_off = [number for number in usual if signal.getsignal(number) == signal.SIG_IGN]
    for number in switched_off:
        signal.signal(number, usual[number])
    yield
    for number in switched_off:
        signal.signal(number, signal.SIG_IGN)


class TokenPair(NamedTuple):
    """A small corpus in bytes, V=257."""

    train: Path  # 20,000 tokens
    val: Path  # 2,000 tokens


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> TokenPair:
    """Token files of made-up sentences, in which there is something to learn; read-only by agreement."""
    folder = tmp_path_factory.mktemp("tokens")
    rng = np.random.default_rng(1)
    words = ["".join(rng.choice(list("aeilmnorst"), size)) for size in rng.integers(2, 8, 40)]
    text = " ".join(rng.choice(words, 6000)).encode()
    pair = TokenPair(folder / "train.bin", folder / "val.bin")
    write_token_file(pair.train, np.frombuffer(text[:20000], np.uint8))
    write_token_file(pair.val, np.frombuffer(text[20000:22000], np.uint8))
    return pair
