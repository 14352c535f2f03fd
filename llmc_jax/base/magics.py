"""The header of 256 int32 that llm.c's files begin with, and what each file is by its first. Leaves out the others."""

import struct
from pathlib import Path

from llmc_jax.base.errors import FormatError

HEADER_BYTES = 1024

MODEL = 20240326
DEBUG_STATE = 20240327
TOKENIZER = 20240328
GPT2_TOKENS = 20240520
EVALUATION = 20240522
TRAINING_STATE = 20240527
LLAMA3_TOKENS = 20240801
LLAMA3_MODEL = 20240803

MEANINGS = {
    MODEL: "a GPT-2 checkpoint of llm.c (give it to -e)",
    DEBUG_STATE: "a debug state of llm.c",
    TOKENIZER: "a tokenizer file of llm.c (give it to --tokenizer)",
    GPT2_TOKENS: "a file of GPT-2 tokens (give it to -i or -j)",
    EVALUATION: "an evaluation file of llm.c (HellaSwag)",
    TRAINING_STATE: "a training state of llm.c",
    LLAMA3_TOKENS: "a file of Llama 3 tokens (give it to -i or -j)",
    LLAMA3_MODEL: "a Llama 3 model of llm.c",
}


def read_header(path: str | Path, raw: bytes, magic: int, what: str) -> tuple[int, ...]:
    """Return the 256 integers out of a file's first bytes: HEADER_BYTES or more of them, or all that there are.

    Raises FormatError if the first is not `magic`, or the file ends before the last.
    """
    found = int.from_bytes(raw[:4], "little", signed=True)
    if len(raw) >= 4 and found != magic:
        if int.from_bytes(raw[:4], "big") == magic:
            raise FormatError(f"{path}: {what}, but big-endian; write it again on a little-endian machine")
        if found in MEANINGS:
            raise FormatError(f"{path}: this is {MEANINGS[found]}, magic {found}; expected {what}, magic {magic}")
        raise FormatError(f"{path}: not {what}: it starts with {found}, expected magic {magic}")
    if len(raw) < HEADER_BYTES:
        raise FormatError(f"{path}: truncated: {len(raw)} bytes; {what} begins with a header of {HEADER_BYTES}")
    return struct.unpack_from("<256i", raw)
