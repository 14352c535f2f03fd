"""A file of algorithms: under which name it is kept, what is refused, and that XLA is given it."""

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from llmc_jax.base.errors import InputError
from llmc_jax.config.train import TrainConfig
from llmc_jax.machine import algorithms, compiling, gpus
from llmc_jax.machine.compiling import PINNED, TRITON_GEMM, pinned
from llmc_jax.trials import here

MADE_ON_HOPPER = b'version: 3\nresults { device: "CUDA: 9.0, Cores: 132, GPU clock: 1.98 GHz" }\n'
NAME = f"algorithms_{hashlib.sha256(MADE_ON_HOPPER).hexdigest()[:12]}.txt"
H200, A100 = (gpus.machine_of(gpus.TARGETS[name].device_kind) for name in ("h200", "a100"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "mine.txt").write_bytes(MADE_ON_HOPPER)
    return tmp_path / "mine.txt"


def test_a_file_is_named_by_what_stands_in_it(file: Path) -> None:
    assert algorithms.kept("") == ""
    assert algorithms.kept(str(file)) == NAME and algorithms.path_of(NAME).read_bytes() == MADE_ON_HOPPER
    file.write_bytes(b"other")
    other = algorithms.kept(str(file))
    assert other != NAME and algorithms.path_of(NAME).read_bytes() == MADE_ON_HOPPER
    binary = file.rename(file.with_suffix(".pbtxt"))  # which XLA takes for a binary file
    assert algorithms.kept(str(binary)) == other.replace(".txt", ".pb")


def test_a_run_takes_its_own_copy(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / NAME).write_bytes(MADE_ON_HOPPER)
    monkeypatch.chdir(tmp_path)
    Path(NAME).write_bytes(b"other")
    assert algorithms.kept(NAME, str(run)) == NAME and algorithms.kept(NAME) != NAME
    assert algorithms.kept(str(file), str(run)) == NAME


@pytest.mark.parametrize("content", [None, b"", b" \n"])
def test_what_cannot_be_used_is_refused_in_one_line(content: bytes | None, file: Path) -> None:
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InputError, match=rf"^--algorithms {file}: [^\n]+ wrote with this JAX[^\n]*$"):
        algorithms.kept(str(file))


def test_a_file_of_another_kind_of_gpu(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, options = TrainConfig(algorithms=algorithms.kept(str(file))), []
    monkeypatch.setattr(compiling, "compiled", lambda _, given: options.append(given))
    here.check_algorithms(asked, H200)
    assert options == [((PINNED, NAME),)]
    with pytest.raises(InputError, match=r"^--algorithms: was made on .* capability 9\.0, and this one has 8\.0"):
        here.check_algorithms(asked, A100)
    for nothing_to_do in ((TrainConfig(), H200), (asked, gpus.Machine("cpu", "cpu"))):
        here.check_algorithms(*nothing_to_do)
    file.write_bytes(b"a file that does not say for which GPU it is")
    here.check_algorithms(TrainConfig(algorithms=algorithms.kept(str(file))), A100)
    assert len(options) == 2


def test_where_algorithms_are_pinned() -> None:
    assert pinned(NAME, "sm_90", {}) == pinned(NAME, "sm_90", {TRITON_GEMM: True}) == ((PINNED, NAME),)
    assert pinned("", "sm_90", {}) == pinned(NAME, None, {}) == pinned(NAME, "sm_90", {PINNED: "mine.txt"}) == ()


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("INVALID_ARGUMENT: Version mismatch in autotune results. Expected 3 but was 99.\nmore", InputError),
        ("FAILED_PRECONDITION: Autotune results file does not exist: x", InputError),
        ("RESOURCE_EXHAUSTED: out of memory", jax.errors.JaxRuntimeError),
    ],
)
def test_what_xla_is_given_and_says(said: str, expected: type[Exception]) -> None:
    given: dict[str, Any] = {}

    def compile_with(compiler_options: dict[str, Any]) -> None:
        given.update(compiler_options)
        raise jax.errors.JaxRuntimeError(said)

    with pytest.raises(expected) as error:
        compiling.compiled(SimpleNamespace(compile=compile_with), ((TRITON_GEMM, False), (PINNED, NAME)))
    assert given == {TRITON_GEMM: False, PINNED: str(algorithms.path_of(NAME))}
    if expected is InputError:
        assert "\n" not in str(error.value) and str(algorithms.path_of(NAME)) in str(error.value)
        assert said.splitlines()[0].rstrip(".") in str(error.value)
