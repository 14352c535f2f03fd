"""Makes hugging_face/: a tiny random GPT-2 as transformers saves it, and what it computes, the reference of a test.

    python tests/golden/make_hugging_face.py [OUT]      (OUT: the folder hugging_face beside this file)

Needs PyTorch and transformers, and nothing of this project: the committed files were made with transformers 5.23.0,
torch 2.13.0 (CPU), Python 3.11. A second; the same versions give the same files byte for byte, but for the names of
versions in the JSON files.

    config.json, generation_config.json, model.safetensors      as save_pretrained writes them, float32
    bf16.safetensors            the same weights in bfloat16, the file that save_pretrained writes then
    logits.npz                  tokens (3, T) int64, logits (3, T, V) float32, of the float32 model in evaluation mode

Weights are N(0, 0.3), biases N(0, 0.1) and layernorm weights 1 + N(0, 0.1): large enough that a transposed matrix or a
missing bias changes the logits in the first digit.
"""

import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

L, NH, C, V, maxT = 2, 2, 16, 61, 24


def make_model():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=V, n_positions=maxT, n_embd=C, n_layer=L, n_head=NH, bos_token_id=None, eos_token_id=None
    )
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".ln_" in name and name.endswith("weight"):
                parameter.normal_(1.0, 0.1)
            else:
                parameter.normal_(0.0, 0.1 if name.endswith("bias") else 0.3)
    return model


def main():
    torch.set_num_threads(1)
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("hugging_face")
    model = make_model()
    tokens = torch.randint(0, V, (3, maxT), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model(tokens).logits
    model.save_pretrained(out)
    np.savez_compressed(out / "logits.npz", tokens=tokens.numpy(), logits=logits.numpy())
    with tempfile.TemporaryDirectory() as folder:
        model.to(torch.bfloat16).save_pretrained(folder)
        shutil.copyfile(Path(folder) / "model.safetensors", out / "bf16.safetensors")
    for path in sorted(out.iterdir()):
        path.chmod(0o644)
        print(f"{path.name}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
