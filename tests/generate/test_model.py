"""Tests of a checkpoint's end of text, its tokenizer, and the choice of its weights."""

from typing import Any

import jax
import numpy as np
import pytest

from llmc_jax.base.errors import InputError
from llmc_jax.checkpoint.source import Source, SpecialTokens
from llmc_jax.checkpoint.sources import open_source
from llmc_jax.data import tokenizers
from llmc_jax.generate import model as models
from llmc_jax.generate.model import end_of_text, open_model, read_weights
from llmc_jax.models.layout import num_parameters

SHAPE = "L2-NH2-C16-V257-T32"


def source(**change: Any) -> Source:
    return open_source(SHAPE)._replace(**change)


@pytest.mark.parametrize(
    ("eos", "tokenizer", "expected"),
    [
        (None, None, 256), (None, "bytes", 256), (7, None, 7), (7, "bytes", 7), (300, None, 256),
        ([300, 9, 7], None, 9), ([9, 7], "bytes", 9), ([9, 256], "bytes", 256), ([300], "bytes", 256), ([], None, 256),
    ],
)  # fmt: skip
def test_the_end_of_text_is_the_formats_where_the_model_has_it(eos: Any, tokenizer: Any, expected: int) -> None:
    """Of several, as Hugging Face's config.json may name them, the tokenizer's or else the first."""
    found = tokenizers.bytes_tokenizer() if tokenizer else None
    assert end_of_text(source(special=SpecialTokens(None, eos)), found) == expected


def test_bf16_takes_the_16_bit_weights_that_a_run_has_computed_with() -> None:
    def read(group: str, tensor: str, layer: int) -> np.ndarray:
        return (1 if group == "params" else 2) * np.ones_like(plain.read("params", tensor, layer))

    plain = source()
    mixed = plain._replace(dtype="bf16", groups=("params", "copy"), read=read)
    found = {dtype: read_weights(mixed, dtype)[0] for dtype in ("fp32", "bf16", "fp16")}
    assert {dtype: float(weights.lnfw[0]) for dtype, weights in found.items()} == {"fp32": 1, "bf16": 2, "fp16": 1}
    assert all(each.dtype == "bfloat16" for each in jax.tree.leaves(found["bf16"]))


def test_weights_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = 4 * num_parameters(source().config)
    for available, advice in ((needed - 1, "--dtype bf16"), (needed // 2 - 1, "smaller model")):
        monkeypatch.setattr(models, "available_memory_bytes", lambda available=available: available)
        with pytest.raises(InputError, match=advice):
            open_model(SHAPE, dtype="fp32")
