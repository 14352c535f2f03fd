"""The programs of a run: kept, found again by the run and by runs alike, made anew where they are damaged or others."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental.compilation_cache import compilation_cache

from llmc_jax.models.layout import flat_size
from llmc_jax.plan.compiled import arguments, plan_for
from llmc_jax.plan.plan import Plan, step_numbers
from llmc_jax.run import programs
from llmc_jax.run.command import main
from llmc_jax.run.weights import first_state
from llmc_jax.trials.known import clear, run_programs
from tests.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("quick_compilation")

ROOT = Path(__file__).resolve().parents[2]
FLAGS = "-e L1-NH1-C16-V257-T16 -b 4 -t 16 -x 4 -v 0 -s 0 -n 2"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for programs, and one for runs alike; afterwards JAX keeps them where it did before."""
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("LLMC_JAX_CACHE", str(tmp_path / "cache"))
    names = (
        "jax_compilation_cache_dir", "jax_enable_compilation_cache", "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )  # fmt: skip
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    yield tmp_path / "run" / "xla_cache"
    compilation_cache.reset_cache()
    for name, value in before.items():
        jax.config.update(name, value)


def compile_something(number: float) -> None:
    jax.jit(lambda x: jnp.sin(x) * number).lower(np.zeros(7, np.float32)).compile()


def entries(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.name.endswith("-cache")}


# ----- the files ------------------------------------------------------------------------------------------------------


def spoilt(file: Path, damage: str) -> None:
    data = file.read_bytes()
    if damage == "torn":
        file.write_bytes(data[:100])
    elif damage == "flipped":
        file.write_bytes(data[:50] + bytes([data[50] ^ 1]) + data[51:])
    elif damage == "gone":
        file.unlink()


@pytest.mark.parametrize("damage", ["torn", "flipped", "gone", "unknown"])
def test_a_damaged_program_is_thrown_away_and_told_of(cache: Path, damage: str) -> None:
    cache.parent.mkdir()
    shared = run_programs() / "key"
    assert not programs.keep(cache, shared).complete  # a run that resumes here has lost its folder
    compile_something(0.25)
    kept = programs.keep(cache, shared)._replace(shared=shared)
    compile_something(0.25)
    kept.seal()
    assert programs.keep(cache, shared).complete
    compile_something(0.25)
    (name,) = entries(cache)  # the third was found, not compiled again
    file = cache / name
    spoilt(file, damage)
    if damage == "unknown":  # written after the last checkpoint, perhaps only in part
        (cache / "other-cache").write_bytes(b"half")
    assert programs.keep(cache, shared).complete == (damage == "unknown")
    assert entries(cache) == ({name} if damage == "unknown" else set())
    compile_something(0.25)
    assert entries(cache) == {name}


def test_rubbish_in_the_list_of_programs(cache: Path) -> None:
    cache.mkdir(parents=True)
    for rubbish in (b"", b"{", b"[1]", b'{"a": 1}', b"null", b"\xff"):
        (cache / programs.SEAL).write_bytes(rubbish)
        programs.keep(cache, run_programs() / "key")


def test_a_cache_that_the_user_named_stays(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "elsewhere")
    kept = programs.keep(cache, run_programs() / "key")
    kept.seal()
    assert kept.step is None
    assert not cache.exists() and not run_programs().exists()


@pytest.mark.parametrize("damage", ["torn", "flipped", "gone"])
def test_a_damaged_copy_for_runs_alike_is_made_anew(cache: Path, damage: str, tmp_path: Path) -> None:
    shared = run_programs() / "key"
    for name in ("one", "two", "three"):
        own = tmp_path / name
        kept = programs.keep(own, shared)
        kept.step.write_bytes(b"lowered")
        assert entries(own) == (set() if name in ("one", "two") else entries(shared))
        compile_something(0.5)
        kept.seal()
        assert entries(own) == entries(shared) != set()
        if name == "one":
            spoilt(shared / next(iter(entries(shared))), damage)
    assert json.loads((shared / programs.SEAL).read_bytes()) == programs._digests(shared)


def shared_by(own: Path, key: str) -> Path:
    """Put what a run in a folder has where new runs of this combination look; return where."""
    kept = programs.keep(own, run_programs() / key)
    kept.step.write_bytes(key.encode())
    kept.seal()
    return kept.shared


@pytest.mark.parametrize("latest", [0, 1])
def test_what_runs_use_stays_longest(latest: int, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "MOST", 2)
    for number in range(2):
        os.utime(shared_by(tmp_path / f"{number}", f"key{number}"), (number, number))
    programs.keep(tmp_path / "alike", run_programs() / f"key{latest}")
    shared_by(tmp_path / "2", "key2")
    assert sorted(path.name for path in run_programs().iterdir()) == [f"key{latest}", "key2"]


def test_a_copy_has_the_files_and_not_their_modes(cache: Path, tmp_path: Path) -> None:
    shared = shared_by(tmp_path / "own", "key")
    for path in shared.iterdir():
        path.chmod(0o444)
    shared.chmod(0o555)
    try:
        kept = programs.keep(tmp_path / "new", shared)
        (tmp_path / "new" / "more").write_text("more")
        assert all(path.stat().st_mode & 0o200 for path in [tmp_path / "new", *(tmp_path / "new").iterdir()])
        assert kept.step.read_bytes() == b"key"
    finally:
        shared.chmod(0o755)


def test_a_list_of_programs_that_is_a_folder(cache: Path, tmp_path: Path) -> None:
    shared = shared_by(tmp_path / "own", "key")
    (shared / programs.SEAL).unlink()
    (shared / programs.SEAL).mkdir()
    kept = programs.keep(tmp_path / "new", shared)
    assert not list((tmp_path / "new").iterdir())
    kept.step.write_bytes(b"key")
    kept.seal()
    assert programs.keep(tmp_path / "newest", shared).step.read_bytes() == b"key"


def test_a_run_that_resumes_with_another_step_shares_nothing(cache: Path, tmp_path: Path) -> None:
    shared_by(tmp_path / "own", "key")
    assert not shared_by(tmp_path / "own", "other").exists()


def test_what_killed_processes_left_goes_and_links_do(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "MOST", 2)
    folder = run_programs()
    for name, age in ((".old", 60), (".new", 0)):
        (folder / name / "new").mkdir(parents=True)
        os.utime(folder / name, (time.time() - age,) * 2)
    shared_by(tmp_path / "own", "key")
    assert sorted(path.name for path in folder.iterdir()) == [".new", "key"]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").touch()
    (folder / "link").symlink_to(elsewhere)
    for _ in range(2):
        clear()
        assert not folder.exists() and (elsewhere / "file").exists()


def plan_of(words: str) -> Plan:
    return plan_for("cpu", f"{FLAGS} {words}")


def folder_of(words: str = "", **environment: str) -> Path:
    plan = plan_of(words)
    return programs.shared_of(plan, arguments(plan), environment)


def test_what_is_alike_and_what_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    here = folder_of()
    # numbers that are arguments of the program, and what only the host does
    assert {folder_of(words) for words in ("-l 1e-5 -u 7", "-x 9 -n 5 -o else", "-v 3 -m 2 --seed 3")} == {here}
    assert folder_of(source="measured") == here  # whose figures chose is nothing of the program's
    words = (
        "-b 2", "-t 8", "-d 128", "--dtype bf16", "-r 0", "-k constant", "-c 0.1", "--logit-rows 8",
        "-e L2-NH1-C16-V257-T16",
    )  # fmt: skip
    found = [*map(folder_of, words), folder_of(jax="0.0"), folder_of(driver="1")]
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    found.append(folder_of())
    monkeypatch.delenv("XLA_FLAGS")
    monkeypatch.setattr(programs, "driver_version", lambda: "580")
    found.append(folder_of())
    assert len({here, *found}) == 1 + len(found)


# ----- the lowered step -----------------------------------------------------------------------------------------------


def lowered(plan: Plan, path: Path | None) -> programs.LoweredStep:
    return programs.lower_step(arguments(plan), plan.model, plan.step_options, path)


@pytest.mark.slow
@pytest.mark.parametrize("words", ["", "-d 128 --dtype bf16 -w 0"])
def test_a_kept_step_makes_the_bits_of_the_usual_one(words: str, tmp_path: Path) -> None:
    plan = plan_of(words)
    tokens = np.random.default_rng(0).integers(0, 257, (2, plan.config.micro_batches, 4, 16)).astype(np.int32)
    results = []
    lowered(plan, path := tmp_path / "a.step")  # writes it, and below it is read
    for kept in (None, path):
        found = lowered(plan, kept)
        state = first_state(np.linspace(-0.1, 0.1, flat_size(plan.model), dtype=np.float32), plan)
        program = found.lowered.compile()
        assert program.memory_analysis().alias_size_in_bytes > 0
        results.append(
            found.call(program)(state, *tokens, jax.device_put(step_numbers(plan.config, plan.optimizer, 9)))
        )
    usual, kept_one = results
    assert jax.tree.structure(usual) == jax.tree.structure(kept_one)
    for one, another in zip(jax.tree.leaves(usual), jax.tree.leaves(kept_one), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(another).tobytes()


@pytest.mark.slow
def test_a_step_of_another_shape_or_a_damaged_one_is_lowered_anew(tmp_path: Path) -> None:
    path, plan = tmp_path / "a.step", plan_of("")
    lowered(plan_of("-b 2"), path)
    for content in (path.read_bytes(), path.read_bytes()[:200], b"", b"rubbish" * 100):
        path.write_bytes(content)
        lowered(plan, path)
        found = export.deserialize(bytearray(path.read_bytes()))
        assert [each.shape for each in found.in_avals] == [each.shape for each in jax.tree.leaves(arguments(plan))]


@pytest.mark.parametrize("error", [ImportError, ValueError])
def test_what_cannot_be_exported_is_lowered_as_usual(
    error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise error("no")

    monkeypatch.setattr(export, "export", fails)
    found = lowered(plan_of(""), tmp_path / "a.step")
    assert found.result is None and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_gpus_kept_step_names_the_library_of_its_kernels(tmp_path: Path) -> None:
    """Importing mosaic does it, in a process that lowers no kernel too: XLA finds no symbol of theirs without."""
    path, plan = tmp_path / "a.step", plan_of("")
    programs.lower_step(arguments(plan), plan.model, plan.step_options, path, ("cuda",))
    code = f"""
import sys
from pathlib import Path
from llmc_jax.plan.compiled import arguments, plan_for
from llmc_jax.run import programs
plan = plan_for("cpu", {FLAGS!r})
programs._exported = None
imported = ["pallas_kernels.mosaic" in sys.modules]
programs.lower_step(arguments(plan), plan.model, plan.step_options, Path({str(path)!r}), ("cuda",))
imported.append("pallas_kernels.mosaic" in sys.modules)
print(imported)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[False, True]"


def test_a_run_alike_lowers_and_compiles_nothing(
    cache: Path, tokens: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_lasts: None
) -> None:
    """As on a GPU; and it makes the same losses, as does one that resumes."""
    monkeypatch.setattr(programs, "are_kept", lambda _: True)
    misses: list[str] = []
    jax.monitoring.register_event_listener(
        lambda name, **_: misses.append(name) if name.endswith("cache_misses") else None
    )

    def train(name: str, *more: str) -> list[float]:
        words = [*FLAGS.split(), "-i", str(tokens.train), "-j", str(tokens.val), "-o", str(tmp_path / name), *more]
        assert main([*words, "--print-every", "0"]) == 0
        return [each["loss"] for each in read_metrics(tmp_path / name / "metrics.jsonl") if each["event"] == "train"]

    first = train("first")
    kept = {path.name for path in (tmp_path / "first/xla_cache").iterdir()}
    assert any(name.startswith("jit_step_fn") for name in kept) and any(name.endswith(".step") for name in kept)
    monkeypatch.setattr(programs, "_exported", None)  # nothing is exported again
    assert train("second") == first
    assert train("second", "-y", "1", "-x", "6")[:4] == first
    assert {path.name for path in (tmp_path / "second/xla_cache").iterdir()} == kept  # a miss would have written more
