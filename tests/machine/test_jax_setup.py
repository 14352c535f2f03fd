"""The program's surroundings: a restart, what is set aside, a cache that cannot be written."""

import os
import platform
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import pytest

from llmc_jax.base.errors import InputError
from llmc_jax.machine import jax_setup


def test_a_ctrl_c_waits_while_python_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    masks: list[bool] = []

    def note_mask(*_: object) -> None:
        masks.append(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))

    for name in ("GLIBC_TUNABLES", "LLMC_JAX_NO_RESTART"):
        monkeypatch.setenv(name, "")  # so that it is as before in the end
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(Path, "read_text", lambda _: "always [madvise] never")
    monkeypatch.setattr(os, "execv", note_mask)
    jax_setup.restart_with_huge_pages()
    jax_setup.restart_with_huge_pages()  # in the new process
    note_mask()
    assert masks == [True, False]


KEEPING = """
import sys
import numpy as np, psutil
from llmc_jax.machine.device import Device
from llmc_jax.machine.jax_setup import keep_freed
keep_freed(Device(sys.argv[1], "", 1, 4 * 2**30, 1, ""), int(sys.argv[2]))
np.ones(2**27, np.int8)
print(psutil.Process().memory_info().rss)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_freed_memory_is_kept_after_a_restart_on_a_cpu_that_has_enough() -> None:
    def rss(tunables: str, *arguments: object) -> int:
        environment = {**jax_setup.child_environment(), "GLIBC_TUNABLES": tunables}
        return int(subprocess.check_output([sys.executable, "-c", KEEPING, *map(str, arguments)], env=environment))

    kept = rss(jax_setup.TUNABLES, "cpu", 2**30)
    others = rss("glibc.malloc.arena_max=1", "cpu", 2**30), rss(jax_setup.TUNABLES, "gpu", 2**30)
    assert kept - max(*others, rss(jax_setup.TUNABLES, "cpu", 2**31)) > 2**26


def test_what_is_set_aside_is_said_once_and_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("JAX_ENABLE_X64", "yes"), ("JAX_NUMPY_RANK_PROMOTION", "warn"), ("JAX_DEBUG_NANS", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("JAX_NUMPY_DTYPE_PROMOTION", "standard")  # as it is needed
    with jax.enable_x64(True), jax.numpy_rank_promotion("warn"):
        (note,) = jax_setup.settle()
        assert jax_setup.settle() == []
        jax_setup.configure()
    assert note.startswith("JAX_ENABLE_X64=yes, JAX_NUMPY_RANK_PROMOTION=warn: ")
    assert not jax.config.read("jax_enable_x64")
    assert not set(jax_setup.NEEDED) & set(os.environ)
    assert "JAX_DEBUG_NANS" in os.environ and "JAX_DEBUG_NANS" not in jax_setup.child_environment()


def test_a_process_that_cannot_ask_xla_refuses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such=1")
    with pytest.raises(InputError, match=r"^XLA_FLAGS: [^\n]*--xla_no_such=1;"):
        jax_setup.settle()
    other = tmp_path / "python"
    other.write_text("#!/bin/sh\necho killed >&2; exit 137\n")
    other.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(other))
    assert jax_setup.settle() == []


def test_a_cache_that_cannot_be_written_is_one_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    try:
        (tmp_path / "file").write_text("x")
        monkeypatch.setenv("LLMC_JAX_CACHE", str(tmp_path / "file"))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            (note,) = jax_setup.configure()
        assert note.startswith(f"{tmp_path / 'file' / 'xla'}: cannot be written (")
        assert jax.config.jax_compilation_cache_dir is None
        monkeypatch.setenv("LLMC_JAX_CACHE", str(tmp_path / "new"))
        assert jax_setup.configure() == []
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "new" / "xla")
        assert os.listdir(tmp_path / "new" / "xla") == []
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
