"""Hugging Face's generate on a folder's weights, timed: the peer that benchmarks/generate.py measures against.

Runs under an interpreter that has PyTorch and transformers; imports nothing of this project but turns.py. Greedy, with
its cache of keys and values, all cores. Leaves out how the folder was made.

    python benchmarks/transformers_peer.py FOLDER fp32

Answers each line of stdin, a prompt of ids and a number of tokens, with the milliseconds of one token after the first,
and the tokens.
"""

import os
import sys
import time
from typing import Any

import torch
import transformers
from turns import serve

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main() -> None:
    folder, dtype = sys.argv[1:]
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype]).eval()

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        prompts = torch.tensor([request["prompt"]] * request["samples"])
        seconds = []
        with torch.inference_mode():
            for tokens in (1, request["tokens"]):
                start = time.perf_counter()
                found = model.generate(
                    prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=tokens,
                    min_new_tokens=tokens, pad_token_id=0,
                )  # fmt: skip
                seconds.append(time.perf_counter() - start)
        new = found[0, len(request["prompt"]) :].tolist()
        return {"ms": 1e3 * (seconds[1] - seconds[0]) / (request["tokens"] - 1), "tokens": new}

    about = {"torch": torch.__version__, "transformers": transformers.__version__, "threads": torch.get_num_threads()}
    serve(about, answer)


if __name__ == "__main__":
    main()
