"""Versions in turns: what may be compared, how the processes talk, and how ratios are made."""

from dataclasses import replace

import pytest

from llmc_jax.base.errors import InputError
from llmc_jax.config.flags import step_config
from llmc_jax.profile import compare
from llmc_jax.profile.compare import Result, as_text, parse_variant, ratios

WORDS = ["-e", "L1-NH1-C16-V20-T8", "-b", "1", "-t", "8"]


def test_flags_and_presets_with_their_own_models() -> None:
    usual = step_config(WORDS)
    for text, value in (("dtype=bf16", "bf16"), ("recompute=0", 0), ("logit-rows=8", 8), ("logit_rows=8", 8)):
        name = text.partition("=")[0].replace("-", "_")
        assert parse_variant(text, WORDS) == replace(usual, **{name: value})  # type: ignore[arg-type]
    config = parse_variant("preset=demo", ["-b", "2"])
    assert (config.model, config.batch_size, config.total_batch_size) == ("L4-NH4-C128-V257-T128", 2, 2048)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kernels", "must be NAME=VALUE"),
        ("dtype=", "must be NAME=VALUE"),
        ("speed=3", "no flag --speed"),
        ("speed=3", "--speed"),
        ("dtype=fp8", "must be one of"),
        ("train-data=x", "reads no data"),
    ],
)
def test_what_cannot_be_compared(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        parse_variant(text, WORDS)


def test_the_ratio_is_that_of_neighbouring_blocks() -> None:
    """The machine halves its speed in the second round; the other version is always a quarter faster."""
    assert ratios([1.0, 2.0, 1.0], [0.8, 1.6, 0.8]) == pytest.approx((1.25, 1.25, 1.25))
    assert ratios([1.0, 1.0, 1.0], [1.0, 0.5, 2.0]) == pytest.approx((1.0, 0.5, 2.0))


def test_the_text() -> None:
    lines = as_text([Result("this", 0.1, 0.09, 0.2, 1, 1, 1, 256), Result("r=0", 0.05, 0.04, 0.06, 2, 1.5, 2.5, 256)])
    assert lines.splitlines()[2].split()[:2] == ["this", "100.00"]
    assert " ".join(lines.splitlines()[3].split()) == "r=0 50.00 (40.00 - 60.00) 5,120 2.000 (1.500 - 2.500)"


def test_what_a_worker_cannot_do_ends_the_comparison() -> None:
    with pytest.raises(InputError, match=r"too long: .*the model knows 8 positions"):
        compare.compare([("too long", step_config([*WORDS, "-t", "999"]))], rounds=1, steps=1)


@pytest.mark.slow
def test_two_versions() -> None:
    results = compare.compare(
        [("this", step_config(WORDS)), ("recompute=0", parse_variant("recompute=0", WORDS))], rounds=2, steps=2
    )
    assert [result.label for result in results] == ["this", "recompute=0"]
    assert all(result.seconds > 0 and result.tokens == 8 for result in results)
    assert results[0].ratio == 1
