"""Makes hf_tokenizers.json: tokenizer folders of a few hundred ids, and the ids that transformers makes of some texts.

    python tests/golden/make_hf_tokenizers.py [OUT]      (OUT: hf_tokenizers.json beside this file)

Needs transformers, and nothing of this project: the committed file was made with transformers 5.24.0, tokenizers
0.23.3, Python 3.11. Seconds; the same versions give the same file byte for byte.

    shared      what stands in a file of a case as "@name": a vocabulary, the merges
    texts       what was encoded
    cases       by name: its files; `ids` of each text, of AutoTokenizer; `split`, the same with special tokens as text
"""

import json
import sys
import tempfile
from pathlib import Path

import tokenizers
import transformers

PAIRS = [("r", "e"), ("e", "r"), ("1", "2"), ("12", "3"), ("Ġ", "1"), ("Ġ", "re"), ("a", "b"), ("Ġ", "ab")]
TEXTS = [
    "rere er", "123 12 0123", "RE re Re", " ab\n\nab  ab", "<|endoftext|>ab<|endoftext|>", "X XX  XX aXXb XX\n x a b",
    "ab <pad> ab<pad>", "naïve 日本 😀", "", "\n\nre 1", "aſb ﬁ éab É re",
]  # fmt: skip
END = {"id": 264, "content": "<|endoftext|>", "single_word": False, "lstrip": False, "rstrip": False,
       "normalized": False, "special": True}  # fmt: skip
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
WHOLE = {"tokenizer_class": "PreTrainedTokenizerFast"}


def byte_characters():
    printed = [b for b in range(256) if 33 <= b < 127 or 161 <= b < 173 or b >= 174]
    return [chr(b) for b in printed] + [chr(256 + n) for n in range(256 - len(printed))]


def added(number, content, **flags):
    return END | {"id": number, "content": content, "normalized": True, "special": False} | flags


def main():
    made = ["".join(pair) for pair in PAIRS]
    tokens = [*byte_characters(), *made, "<|endoftext|>"]
    vocab = {token: number for number, token in enumerate(tokens)}
    moved = vocab | {made[0]: vocab[made[3]], made[3]: vocab[made[0]]}  # two ids that are not the ranks
    shared = {"vocab": vocab, "moved": moved, "merges": [" ".join(pair) for pair in PAIRS]}
    merges_txt = "\n".join(["#version: 0.2", *shared["merges"], ""])

    def old(vocab="@vocab", **more):
        return {"vocab.json": vocab, "merges.txt": merges_txt, **{f"{name}.json": more[name] for name in more}}

    def new(pre=BYTE_LEVEL, normalizer=None, tokens=(), config=WHOLE, **model):
        whole = {
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": [END, *tokens],
            "normalizer": normalizer, "pre_tokenizer": pre, "post_processor": None, "decoder": BYTE_LEVEL,
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "",
                      "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False, "vocab": "@vocab",
                      "merges": "@merges", **model},
        }  # fmt: skip
        return {"tokenizer.json": whole, "tokenizer_config.json": config}

    def sequence(*stages):
        return {"type": "Sequence", "pretokenizers": [*stages, BYTE_LEVEL]}

    two = (added(265, "XX", lstrip=True, rstrip=True), added(266, "a b", single_word=True))
    split = {"type": "Split", "pattern": {"Regex": r"\d|\s+|[^\s\d]+"}, "behavior": "Isolated", "invert": False}
    pad = added(265, "<pad>", special=True, normalized=False)
    cases = {
        "plain": old(),
        "plain, as tokenizer.json": new(),
        "plain, with GPT-2's class": new(config={"tokenizer_class": "GPT2Tokenizer"}),
        "ids out of order": old("@moved"),
        "ids out of order, as tokenizer.json": new(vocab="@moved"),
        "a space before": old(tokenizer_config={"add_prefix_space": True}),
        "a space before, as tokenizer.json": new(BYTE_LEVEL | {"add_prefix_space": True}),
        "a space before, beside tokenizer.json": new(config={"add_prefix_space": True}),
        "digits": new(sequence({"type": "Digits", "individual_digits": True})),
        "split": new({"type": "Sequence", "pretokenizers": [split, BYTE_LEVEL | {"use_regex": False}]}),
        "lower case": new(normalizer={"type": "Lowercase"}),
        "NFKC and lower case": new(
            normalizer={"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Lowercase"}]}
        ),
        "whole words": new(ignore_merges=True),
        "added_tokens.json": old(added_tokens={"XX": 265, "<pad>": 266}, special_tokens_map={"pad_token": "<pad>"}),
        "added_tokens_decoder": old(
            tokenizer_config={"added_tokens_decoder": {str(each.pop("id")): each for each in map(dict, (END, *two))}}
        ),
        "added tokens": new(tokens=two),
        "added tokens, normalized": new(
            normalizer={"type": "Lowercase"}, tokens=(added(265, "XX"), added(266, "Re", normalized=False))
        ),
        "added tokens, with GPT-2's class": new(tokens=two, config={}),
        "more beside tokenizer.json": new(tokens=(added(265, "XX"),), config=WHOLE)
        | {"added_tokens.json": {"日": 266}},
        "a token for padding": new(tokens=(pad,), config=WHOLE | {"pad_token": "<pad>"}),
    }
    found = {}
    for name, files in cases.items():
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text('{"model_type": "gpt2"}')
            for file, content in files.items():
                text = content if file == "merges.txt" else json.dumps(content)
                for key, value in shared.items():
                    text = text.replace(f'"@{key}"', json.dumps(value))
                (Path(folder) / file).write_text(text)
            encode = transformers.AutoTokenizer.from_pretrained(folder)
            ids, split_ids = (
                [encode(text, add_special_tokens=False, split_special_tokens=as_text)["input_ids"] for text in TEXTS]
                for as_text in (False, True)
            )
        found[name] = {"files": files, "ids": ids, "split": split_ids}
    versions = {"transformers": transformers.__version__, "tokenizers": tokenizers.__version__}
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("hf_tokenizers.json")
    fields = {"versions": versions, "shared": shared, "texts": TEXTS}
    lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in fields.items()]
    rows = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in found.items())
    out.write_text("\n".join(["{", *lines, ' "cases": {', rows, " }", "}", ""]))
    print(f"{out.name}: {out.stat().st_size:,} bytes, {len(found)} cases")


if __name__ == "__main__":
    main()
