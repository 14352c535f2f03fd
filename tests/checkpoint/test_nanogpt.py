"""nanoGPT's checkpoints: the mapping on plain arrays everywhere, files where PyTorch is installed."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc_jax.base.errors import InputError
from llmc_jax.checkpoint.nanogpt import source_of
from llmc_jax.checkpoint.source import Source, slices
from llmc_jax.checkpoint.sources import open_source
from llmc_jax.config.model import ModelConfig
from tests.checkpoint.damage import refused

L, NH, C, V, T = 2, 2, 8, 11, 5
CONFIG = ModelConfig(max_seq_len=T, vocab_size=V, padded_vocab_size=128, num_layers=L, num_heads=NH, channels=C)
ARGS = {"n_layer": L, "n_head": NH, "n_embd": C, "block_size": T, "bias": True, "vocab_size": V, "dropout": 0.0}

# the names and shapes of nanoGPT's model.py, and llm.c's name of each
BLOCK: dict[str, tuple[str, tuple[int, ...]]] = {
    "ln_1.weight": ("ln1w", (C,)), "ln_1.bias": ("ln1b", (C,)),
    "attn.c_attn.weight": ("qkvw", (3 * C, C)), "attn.c_attn.bias": ("qkvb", (3 * C,)),
    "attn.c_proj.weight": ("attprojw", (C, C)), "attn.c_proj.bias": ("attprojb", (C,)),
    "ln_2.weight": ("ln2w", (C,)), "ln_2.bias": ("ln2b", (C,)),
    "mlp.c_fc.weight": ("fcw", (4 * C, C)), "mlp.c_fc.bias": ("fcb", (4 * C,)),
    "mlp.c_proj.weight": ("fcprojw", (C, 4 * C)), "mlp.c_proj.bias": ("fcprojb", (C,)),
}  # fmt: skip


def state_dict(biases: bool = True) -> dict[str, np.ndarray]:
    shapes = {f"h.{layer}.{name}": shape for layer in range(L) for name, (_, shape) in BLOCK.items()}
    shapes |= {"wte.weight": (V, C), "wpe.weight": (T, C), "ln_f.weight": (C,), "ln_f.bias": (C,)}
    rng = np.random.default_rng(3)
    found = {
        f"transformer.{name}": rng.normal(size=shape).astype(np.float32)
        for name, shape in shapes.items()
        if biases or not name.endswith("bias")
    }
    for layer in range(L):
        found[f"transformer.h.{layer}.attn.bias"] = np.tril(np.ones((1, 1, T, T), np.float32))  # the mask, a buffer
    return found | {"lm_head.weight": found["transformer.wte.weight"]}


def checkpoint(**changes: Any) -> dict[str, Any]:
    return {"model": state_dict(), "model_args": ARGS, "iter_num": 250, "config": {"dropout": 0.0}, **changes}


def opened(found: Any) -> Source:
    return source_of(Path("ckpt.pt"), found, np.asarray)


def assert_holds(source: Source, tensors: dict[str, np.ndarray]) -> None:
    """Every tensor by nanoGPT's name; those that are not there are zero."""
    assert source.kind == "nanogpt" and source.config == CONFIG and source.groups == ("params",)
    names = {"wte": "wte.weight", "wpe": "wpe.weight", "lnfw": "ln_f.weight", "lnfb": "ln_f.bias"}
    in_block = {ours: name for name, (ours, _) in BLOCK.items()}
    for piece in slices(CONFIG):
        found = source.read("params", piece.tensor, piece.layer)
        assert found.shape == piece.shape and found.dtype == np.float32
        name = names.get(piece.tensor) or f"h.{piece.layer}.{in_block[piece.tensor]}"
        want = tensors.get(f"transformer.{name}", np.zeros(piece.shape, np.float32))
        np.testing.assert_array_equal(found[: len(want)], want, err_msg=str(piece))
        assert not found[len(want) :].any()


def test_the_mapping() -> None:
    source = opened(checkpoint())
    assert source.step == 250 and source.dtype == "fp32"
    assert_holds(source, state_dict())
    assert any("GELU" in line for line in source.warnings)


def test_without_biases_they_are_zero() -> None:
    tensors = state_dict(biases=False)
    assert_holds(opened(checkpoint(model=tensors, model_args={**ARGS, "bias": False})), tensors)


def with_tensor(name: str, tensor: Any) -> dict[str, Any]:
    model: dict[str, Any] = {**state_dict(), name: tensor}
    return checkpoint(model={key: value for key, value in model.items() if value is not None})


def with_args(**changes: Any) -> dict[str, Any]:
    return checkpoint(model_args={**ARGS, **changes})


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([1], "are not what nanoGPT writes"),
        (checkpoint(model={1: np.zeros(3)}), "are not what nanoGPT writes"),
        (checkpoint(model={"a": "b"}), "are not what nanoGPT writes"),
        (with_args(n_layer=0), "n_layer is 0; expected a whole number"),
        (with_args(vocab_size=12), r"wte\.weight has shape \(11, 8\); by model_args it must be \(12, 8\)"),
        (with_args(bias=False), r"does not have, 'h\.0\.attn\.c_attn\.bias' first"),
        (with_args(bias=1), "has bias 1; expected True or False"),
        (with_tensor("transformer.h.1.mlp.c_fc.weight", None), r"lacks 1 .*h\.1\.mlp\.c_fc\.weight first"),
        (with_tensor("transformer.ln_f.weight", np.zeros(C)), r"ln_f\.weight is float64; expected float32"),
        (with_tensor("lm_head.weight", np.zeros((V, C), "f4")), r"lm_head\.weight differs from transformer\.wte"),
    ],
)
def test_what_is_no_model_of_nanogpt(found: Any, words: str) -> None:
    with refused(Path("ckpt.pt"), words):
        opened(found)


def test_without_pytorch_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    path = tmp_path / "ckpt.pt"
    path.write_bytes(b"PK\x03\x04" + bytes(26) + b"ckpt/data.pkl" + bytes(100))
    with pytest.raises(InputError, match=f"^{path}: a file of PyTorch, which is not installed: pip install torch$"):
        open_source(path)


class Evil:
    """A pickle of this makes a file when it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_files(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    tensors = state_dict()
    model = {name: torch.from_numpy(tensor) for name, tensor in tensors.items()}
    torch.save(checkpoint(model=model, best_val_loss=torch.tensor(1.5)), tmp_path / "ckpt.pt")
    assert_holds(open_source(tmp_path / "ckpt.pt"), tensors)
    assert_holds(open_source(tmp_path), tensors)
    half = {name: tensor.to(torch.bfloat16) for name, tensor in model.items()}
    torch.save(checkpoint(model=half), tmp_path / "bf16.pt")
    source = open_source(tmp_path / "bf16.pt")
    assert source.dtype == "bf16"
    assert_holds(source, {name: tensor.to(torch.float32).numpy() for name, tensor in half.items()})


def test_no_pickle_is_run(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    made = tmp_path / "made"
    torch.save(checkpoint(model=Evil(made)), tmp_path / "evil.pt")
    torch.save(checkpoint(model=Evil(made)), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for name in ("evil.pt", "old.pt"):
        with pytest.raises(InputError) as caught:
            open_source(tmp_path / name)
        assert "\n" not in str(caught.value) and "weights_only` set to `False" not in str(caught.value)
    assert not made.exists()
