"""Hugging Face folders: the logits of transformers, the files that transformers writes, and what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from llmc_jax.base.errors import FormatError
from llmc_jax.checkpoint import conversion
from llmc_jax.checkpoint.hugging_face import read_archive, write_folder
from llmc_jax.checkpoint.source import Slice, Source, SpecialTokens, slices
from llmc_jax.checkpoint.sources import flat_parameters, open_source
from llmc_jax.config.model import ModelConfig
from llmc_jax.data.tokenizers import Table, table_tokenizer
from llmc_jax.models.gpt2 import model as gpt2
from llmc_jax.models.layout import views
from tests.checkpoint.damage import refused

FIXTURE = Path(__file__).resolve().parents[1] / "golden" / "hugging_face"
CONFIG = ModelConfig(max_seq_len=24, vocab_size=61, padded_vocab_size=128, num_layers=2, num_heads=2, channels=16)

HEAD = "lm_head.weight"
DTYPES = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}
NO_IDS = SpecialTokens(None, None)

Tensors = dict[str, np.ndarray]


def reader(source: Source) -> Callable[[Slice], np.ndarray]:
    return lambda piece: source.read("params", piece.tensor, piece.layer)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the fixture that a test may spoil."""
    copy = tmp_path / "hf"
    shutil.copytree(FIXTURE, copy, ignore=shutil.ignore_patterns("bf16.safetensors", "logits.npz"))
    return copy


def set_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config = {key: value for key, value in (config | values).items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(config))


def stored(folder: Path) -> Tensors:
    return {name: t.whole() for name, t in read_archive(folder / "model.safetensors").items()}


def store(path: Path, tensors: Tensors) -> None:
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, path, {"format": "pt"})


def test_logits_are_those_of_transformers() -> None:
    """Same weights, same tokens, float32: both sides round alike to some 1e-6 of logits of the order of 5."""
    source = open_source(FIXTURE)
    assert source.config == CONFIG and source.dtype == "fp32" and source.kind == "hugging-face"
    assert all(reader(source)(piece).flags.c_contiguous for piece in slices(CONFIG))
    with np.load(FIXTURE / "logits.npz") as golden:
        tokens, expected = golden["tokens"], golden["logits"]
    params = views(jnp.asarray(flat_parameters(source)), CONFIG)
    with jax.default_matmul_precision("highest"):
        found = jax.jit(lambda params, x: gpt2.forward(params, x, CONFIG)[0])(params, jnp.asarray(tokens, jnp.int32))
    assert np.abs(expected).max() > 1
    assert np.abs(np.asarray(found)[..., : CONFIG.vocab_size] - expected).max() <= 1e-5


def test_writes_what_transformers_wrote(tmp_path: Path) -> None:
    """The weights byte for byte, in float32 and in bfloat16; the settings but for versions and dropout, unused here."""
    names = ["config.json", "generation_config.json", "model.safetensors"]
    files = {"fp32": "model.safetensors", "bf16": "bf16.safetensors"}
    for stored_as, dtype in (("fp32", "fp32"), ("fp32", "bf16"), ("bf16", "bf16")):
        source = open_source(FIXTURE / files[stored_as])
        assert source.dtype == stored_as
        out = tmp_path / dtype
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        write_folder(out, CONFIG, dtype, reader(source), NO_IDS, {})
        assert (out / "model.safetensors").read_bytes() == (FIXTURE / files[dtype]).read_bytes()
        assert sorted(path.name for path in out.iterdir()) == names
    found = json.loads((tmp_path / "fp32" / "config.json").read_text())
    expected_config = json.loads((FIXTURE / "config.json").read_text())
    del expected_config["transformers_version"]
    for key in ("attn_pdrop", "embd_pdrop", "resid_pdrop", "summary_first_dropout"):
        assert (found.pop(key), expected_config.pop(key)) == (0.0, 0.1)
    assert found == expected_config
    assert json.loads((tmp_path / "bf16" / "config.json").read_text())["dtype"] == "bfloat16"


def test_older_folders_hold_a_causal_mask_and_fewer_settings(folder: Path) -> None:
    expected, tensors = flat_parameters(open_source(folder)), stored(folder)
    mask = np.tril(np.ones((1, 1, 24, 24), np.float32))
    tensors |= {f"h.{i}.attn.bias": mask for i in range(2)} | {"h.1.attn.masked_bias": np.array(-1e4, np.float32)}
    store(folder / "model.safetensors", tensors)
    gone = ("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "add_cross_attention", "n_inner", "dtype")
    set_config(folder, n_ctx=24, **dict.fromkeys(gone, "absent"))
    np.testing.assert_array_equal(flat_parameters(open_source(folder)), expected)


def spelled(out: Path, kept: str, outer: str, inner: str, shards: int, dtype: str) -> Path:
    """Makes a folder of the fixture that keeps its tied tensor as "wte", "head" or "both"; returns it.

    outer, inner: prefixes of all names, and of those within the model. The head alone is as
    `safetensors.torch.save_model` writes a tied model: the other name in the metadata.
    """
    tensors = {
        outer + inner + name.removeprefix("transformer."): array.astype(DTYPES[dtype])
        for name, array in load_file(FIXTURE / "model.safetensors").items()
    }
    wte, metadata = f"{outer}{inner}wte.weight", {"format": "pt"}
    if kept != "wte":
        tensors[outer + HEAD] = tensors[wte]
    if kept == "head":
        del tensors[wte]
        metadata = {wte: outer + HEAD}
    out.mkdir()
    shutil.copy(FIXTURE / "config.json", out)
    if shards == 1:
        save_file(tensors, out / "model.safetensors", metadata)
        return out
    names = sorted(tensors)  # the head and wte in different files
    places = {name: f"model-{at % shards + 1:05d}-of-{shards:05d}.safetensors" for at, name in enumerate(names)}
    for place in set(places.values()):
        save_file({name: tensors[name] for name in names if places[name] == place}, out / place, metadata)
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return out


@pytest.mark.parametrize(
    ("kept", "outer", "inner", "shards", "dtype"),
    [
        ("wte", "", "", 1, "fp32"),
        ("head", "", "transformer.", 3, "bf16"),
        ("both", "_orig_mod.", "transformer.", 1, "fp16"),
        ("head", "module._orig_mod.", "", 1, "fp32"),
        ("both", "module._orig_mod.", "transformer.", 3, "fp32"),
        ("wte", "_orig_mod.", "", 3, "bf16"),
    ],
)
def test_spellings_of_a_tied_head(tmp_path: Path, kept: str, outer: str, inner: str, shards: int, dtype: str) -> None:
    plain = open_source(spelled(tmp_path / "plain", "wte", "", "transformer.", 1, dtype))
    source = open_source(spelled(tmp_path / "hf", kept, outer, inner, shards, dtype))
    assert source._replace(path=plain.path, read=plain.read) == plain
    assert source.dtype == dtype
    assert conversion.passed(source).digest == conversion.passed(plain).digest


def with_heads(folder: Path, wte: np.ndarray | None, head: np.ndarray | None, **config: Any) -> Path:
    """Puts these into a folder's file in the place of its token embedding; returns the folder."""
    tensors = stored(folder)
    del tensors["transformer.wte.weight"]
    both = {"transformer.wte.weight": wte, HEAD: head}
    store(folder / "model.safetensors", tensors | {name: array for name, array in both.items() if array is not None})
    set_config(folder, **config)
    return folder


WTE = read_archive(FIXTURE / "model.safetensors")["transformer.wte.weight"].whole()
NARROW = WTE.astype(DTYPES["bf16"])


@pytest.mark.parametrize(("wte", "head"), [(NARROW, NARROW.astype(np.float32)), (NARROW.astype(np.float32), NARROW)])
@pytest.mark.parametrize("tied", [True, False])
def test_a_head_of_another_dtype_and_the_same_values_is_tied(
    folder: Path, wte: np.ndarray, head: np.ndarray, tied: bool
) -> None:
    """As transformers has it, which compares values and not bytes."""
    source = open_source(with_heads(folder, wte, head, tie_word_embeddings=tied))
    assert source.dtype == "fp32"  # that of the other tensors
    np.testing.assert_array_equal(source.read("params", "wte", 0)[:61], NARROW.astype(np.float32))


@pytest.mark.parametrize(
    ("wte", "head", "tied", "words"),
    [
        (WTE, NARROW, True, r"lm_head\.weight differs from transformer\.wte\.weight \(bf16 and fp32\)"),
        (WTE, -WTE, True, r"lm_head\.weight differs from transformer\.wte\.weight: the model is untied"),
        (WTE, -WTE, False, "the model is untied"),
        (WTE, WTE[:60], True, r"lm_head\.weight has shape \(60, 16\); by config\.json it must be \(61, 16\)"),
        (WTE, WTE.astype(np.float64), True, r"lm_head\.weight is F64; expected float32"),
        (None, WTE, False, r"tie_word_embeddings false.* no wte\.weight"),
        (WTE, None, False, r"tie_word_embeddings false.* no lm_head\.weight"),
        (None, None, True, r"lacks 1 of a GPT-2's 28 tensors, wte\.weight first"),
    ],
)
def test_heads_that_are_refused(
    folder: Path, wte: np.ndarray | None, head: np.ndarray | None, tied: bool, words: str
) -> None:
    with refused(folder / "model.safetensors", words):
        open_source(with_heads(folder, wte, head, tie_word_embeddings=tied))


@pytest.mark.parametrize("ids", [(3, 5), (3, [5, 7]), (None, 5), (None, None)])
def test_the_ids_that_begin_and_end_a_text_come_back(folder: Path, tmp_path: Path, ids: tuple[Any, Any]) -> None:
    special = SpecialTokens(*ids)
    set_config(folder, bos_token_id=special.bos, eos_token_id=special.eos)
    assert open_source(folder).special == special
    out = tmp_path / "out"
    conversion.to_hugging_face(open_source(folder), out, "bf16", {}, special, {})
    config = json.loads((out / "config.json").read_text())
    assert SpecialTokens(config["bos_token_id"], config["eos_token_id"]) == special
    generation = json.loads((out / "generation_config.json").read_text())
    assert (generation.get("bos_token_id"), generation.get("eos_token_id")) == special


def test_ids_that_llmc_has_no_place_for(folder: Path, tmp_path: Path) -> None:
    """On the way back the tokenizer has them, and without one nothing has."""
    set_config(folder, bos_token_id=3, eos_token_id=5)
    conversion.to_model(open_source(folder), tmp_path / "a.bin", "fp32", force=False)
    model = open_source(tmp_path / "a.bin")
    assert model.special is None
    conversion.to_hugging_face(model, tmp_path / "back", "fp32", {}, conversion.special_tokens(model, None), {})
    assert open_source(tmp_path / "back").special == NO_IDS
    tokenizer = table_tokenizer("some", Table(tuple(b"x%d" % token for token in range(61)), 5), "")
    assert conversion.special_tokens(model, tokenizer) == (5, 5)
    assert conversion.special_tokens(open_source(FIXTURE), tokenizer) == (5, 5)
    assert conversion.special_tokens(open_source(folder), tokenizer) == (3, 5)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"activation_function": "relu"}, "activation_function is 'relu'; this model has 'gelu_new'"),
        ({"n_inner": 100}, r"n_inner is 100; this model's MLP has 4 x n_embd = 64"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ({"scale_attn_weights": 1}, "scale_attn_weights is 1; this model has True"),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon is 1e-06; this model has 1e-05"),
        ({"model_type": "llama"}, "model_type is 'llama'; this model has 'gpt2'"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'"),
        ({"n_layer": 0}, "n_layer is 0; expected a whole number from 1"),
        ({"n_layer": True}, "n_layer is True; expected"),
        ({"vocab_size": 10**30}, "vocab_size is 1000000000000000000000000000000; expected"),
        ({"n_head": 3}, "n_embd 16 is not a multiple of n_head 3"),
        ({"n_layer": 3}, "lacks 12 of a GPT-2's 40 tensors, h.2.ln_1.weight first"),
        (
            {"n_layer": 1},
            "holds 12 tensors that a plain GPT-2 with this config.json does not have, 'h.1.attn.c_attn.bias'",
        ),
        ({"n_layer": 2**31 - 1}, "holds 28 tensors, too few for 2,147,483,647 layers"),
        *(({"bos_token_id": value}, "bos_token_id is") for value in ("5", -1, True, 2**40, [5])),
    ],
)
def test_other_models_are_refused(folder: Path, values: dict[str, Any], words: str) -> None:
    set_config(folder, **values)
    with pytest.raises(FormatError, match=words) as caught:
        open_source(folder)
    assert "\n" not in str(caught.value)


def test_broken_folders(folder: Path) -> None:
    weights, config = folder / "model.safetensors", folder / "config.json"
    text = config.read_text()
    for broken, words in (("{", "is not JSON"), ("[]", "is not a JSON object"), (" " * (1 << 20) + text, "at most")):
        config.write_text(broken)
        with pytest.raises(FormatError, match=words):
            open_source(folder)
    config.write_text(text)
    weights.rename(folder / "pytorch_model.bin")
    with pytest.raises(FormatError, match=r"pytorch_model\.bin, a pickle"):
        open_source(folder)
    (folder / "pytorch_model.bin").rename(folder / "other.safetensors")
    config.unlink()
    with pytest.raises(FormatError, match=r"other\.safetensors: there is no config\.json beside it"):
        open_source(folder / "other.safetensors")


# Mutated settings: read, or refused with FormatError in one line

ODD: st.SearchStrategy[Any] = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 70), st.floats(), st.text(max_size=5),
    st.sampled_from([2**31, 2**63, 10**40, -1, 1e-5, 0.0, 1e308]), st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=2), st.none()),
)  # fmt: skip


@st.composite
def mutated_configs(draw: st.DrawFn) -> bytes:
    config = json.loads((FIXTURE / "config.json").read_text())
    for _ in range(draw(st.integers(0, 3))):
        config[draw(st.sampled_from(sorted(config)))] = draw(ODD)
    data = bytearray(json.dumps(config).encode())
    for _ in range(draw(st.integers(0, 2))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data[: draw(st.one_of(st.just(len(data)), st.integers(0, len(data))))])


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(mutated_configs())
def test_mutated_configs(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    folder = tmp_path_factory.getbasetemp() / "mutated-hf"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes(data)
    shutil.copyfile(FIXTURE / "model.safetensors", folder / "model.safetensors")
    try:
        source = open_source(folder)
    except FormatError as error:
        assert "\n" not in str(error)
        return
    assert (source.config.channels, source.config.num_layers, source.config.vocab_size) == (16, 2, 61)
    assert [source.read("params", p.tensor, p.layer).shape == p.shape for p in slices(source.config)]
