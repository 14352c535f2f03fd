"""Makes own_run.json: what transformers makes of a run on a tokenizer of its own, exported to a folder.

    python tests/golden/make_own_run.py FOLDER [OUT]      (OUT: own_run.json beside this file)

FOLDER is what `exported` in tests/run/test_tokenizer.py makes. Needs transformers and PyTorch, and nothing of this
project. The committed file was made with transformers 5.24.0, tokenizers 0.23.3, torch 2.13.0, Python 3.11.

    texts, ids     what was encoded, and its ids
    logits         of the first text's last position: those of the ids `columns`, float32
    sha256         of the folder's files, by name: with others these numbers would say nothing
"""

import hashlib
import json
import sys
from pathlib import Path

import tokenizers
import torch
import transformers

TEXTS = ["the cat sat on the mat.", " two  spaces\n\nthree", "naïve 日本 😀", "12345"]
FILES = ("model.safetensors", "vocab.json", "merges.txt")


def main():
    folder = Path(sys.argv[1])
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32).eval()
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    with torch.no_grad():
        logits = model(torch.tensor([ids[0]])).logits[0, -1]
    columns = [*range(0, len(logits), 977), len(logits) - 1]
    found = {
        "versions": {each.__name__: each.__version__ for each in (transformers, tokenizers, torch)},
        "texts": TEXTS,
        "ids": ids,
        "columns": columns,
        "logits": [float(logits[column]) for column in columns],
        "end_of_text": model.generation_config.eos_token_id,
        "sha256": {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in FILES},
    }
    out = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).with_name("own_run.json")
    lines = (f" {json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in found.items())
    out.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
