"""Questions answered by Hugging Face's GPT-2, timed: the peer that benchmarks/evaluate.py measures against.

As llm.c's hellaswag.py does it: one question at a time, its completions in one batch padded to the longest. Runs under
an interpreter that has PyTorch and transformers; imports nothing of this project but turns.py. All cores.

    python benchmarks/evaluate_peer.py FOLDER

Answers each line of stdin, a list of questions (context, completions) in ids, with the seconds and the summed losses.
"""

import os
import sys
import time
from typing import Any

import torch
import transformers
from torch.nn.functional import cross_entropy
from turns import serve


def losses_of(model: Any, context: list[int], completions: list[list[int]]) -> list[float]:
    """The summed loss of each completion."""
    longest = len(context) + max(map(len, completions))
    ids = torch.zeros(len(completions), longest, dtype=torch.long)
    mask = torch.zeros(len(completions), longest)
    for row, completion in enumerate(completions):
        end = len(context) + len(completion)
        ids[row, :end] = torch.tensor(context + completion)
        mask[row, len(context) : end] = 1
    logits = model(ids).logits[:, :-1]
    losses = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(ids), -1)
    return (losses * mask[:, 1:]).sum(1).tolist()


def main() -> None:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()

    def answer(questions: list[tuple[list[int], list[list[int]]]]) -> dict[str, Any]:
        start = time.perf_counter()
        with torch.inference_mode():
            losses = [losses_of(model, context, completions) for context, completions in questions]
        return {"seconds": time.perf_counter() - start, "losses": losses}

    serve({"torch": torch.__version__, "transformers": transformers.__version__}, answer)


if __name__ == "__main__":
    main()
