"""The example in docs/profiling.md can be made again."""

import pytest

from benchmarks.profile_page import BEGIN, END, PAGE, block_of, with_block


def test_only_what_stands_between_the_marks_changes() -> None:
    page = f"before\n{BEGIN}old\n{END}behind\n"
    assert with_block(page, "new\n") == f"before\n{BEGIN}new\n{END}behind\n"
    assert with_block(with_block(page, "new\n"), "old\n") == page
    with_block(PAGE.read_text(encoding="utf-8"), "")  # which has the marks


@pytest.mark.parametrize("page", ["", BEGIN, END, f"{BEGIN}{END}{END}"])
def test_a_page_without_its_marks_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match="once"):
        with_block(page, "")


def test_the_block_names_command_machine_and_versions_above_the_table() -> None:
    rates = {"flops": 2e11, "products": 1e11, "cache": 1 << 20, "measured": True}
    memory = {"best": 3e10, "median": 2e10, "reading": 2e10, "reading_median": 1e10, "array_bytes": 1 << 28}
    facts = {
        "device": {"kind": "a processor", "cpu_cores": 2}, "jax": "0.12.0", "rates": rates | {"memory": memory},
        "seconds": {"median": 1.0, "low": 0.9, "high": 1.1},
    }  # fmt: skip
    block = block_of("head\n\nrow", facts, ["-b", "4"])
    assert all(each in block for each in ("llmc_jax.profile -b 4", "a processor", "JAX 0.12.0", "1000 ms", "256 MiB"))
    assert block.endswith("\n\n    head\n\n    row\n\n")
