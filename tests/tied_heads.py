"""Folders of one GPT-2 for Hugging Face whose tied tensor, token embedding and output head, is kept in several ways."""

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

HEAD = "lm_head.weight"
DTYPES = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}


class Spelling(NamedTuple):
    """kept: "wte", "head" or "both". outer, inner: prefixes of all names, and of those within the model."""

    kept: str
    dtype: str = "fp32"
    outer: str = ""
    inner: str = "transformer."
    shards: int = 1


def spelled(plain: Path, out: Path, spelling: Spelling) -> Path:
    """Makes a folder of that spelling from a plain one, with float32 and wte alone; returns it.

    The head alone is as `safetensors.torch.save_model` writes a tied model: the other name in the metadata.
    """
    kept, dtype, outer, inner, shards = spelling
    tensors = {
        outer + inner + name.removeprefix("transformer."): array.astype(DTYPES[dtype])
        for name, array in load_file(plain / "model.safetensors").items()
    }
    wte, head = f"{outer}{inner}wte.weight", outer + HEAD
    metadata = {"format": "pt"}
    if kept != "wte":
        tensors[head] = tensors[wte]
    if kept == "head":
        del tensors[wte]
        metadata = {wte: head}
    out.mkdir()
    shutil.copy(plain / "config.json", out)
    if shards == 1:
        save_file(tensors, out / "model.safetensors", metadata)
        return out
    names = sorted(tensors)  # the head and wte in different files
    places = {name: f"model-{at % shards + 1:05d}-of-{shards:05d}.safetensors" for at, name in enumerate(names)}
    for place in set(places.values()):
        save_file({name: tensors[name] for name in names if places[name] == place}, out / place, metadata)
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return out
