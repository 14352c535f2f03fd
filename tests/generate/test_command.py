"""`llmc-jax generate`: what comes out, where it goes, what is refused, and with which exit status."""

import io
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from llmc_jax.base.errors import InputError
from llmc_jax.data.tokenizers import printable, write_tokenizer_bin
from llmc_jax.generate import answer
from llmc_jax.generate.command import main, texts_of_kernels
from llmc_jax.generate.flags import parse
from llmc_jax.generate.sampling import Sampling

MODEL = "L2-NH2-C16-V257-T32"  # random weights; the tokens are bytes


class Done(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self.out)
        return content


Ask = Callable[..., Done]


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Run the command line with words, after the model's name, and with something on standard input."""

    def ask(*words: str, stdin: bytes = b"") -> Done:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        return Done(main([MODEL, *words]), *capsys.readouterr())

    return ask


def test_json_says_all_and_the_screen_shows_the_same_text(ask: Ask) -> None:
    done = ask("--prompt", "ab", "-n", "9", "--json", "--top-k", "90", "--seed", "3")
    found = done.json
    assert (done.status, found["prompt"]) == (0, {"text": "ab", "ids": [97, 98]})
    assert (found["settings"]["top_k"], found["settings"]["seed"], found["settings"]["tokens"]) == (90, 3, 9)
    assert (found["model"]["kind"], found["model"]["dtype"], found["model"]["end_of_text"]) == ("random", "fp32", 256)
    (sample,) = found["samples"]
    assert len(sample["ids"]) == len(sample["logprobs"]) == found["tokens"] == 9
    assert sample["end"] == "length" and all(value < 0 for value in sample["logprobs"])
    assert sample["text"] == bytes(sample["ids"]).decode(errors="replace")
    shown = ask("--prompt", "ab", "-n", "9", "--top-k", "90", "--seed", "3")
    assert shown.out == printable("ab" + sample["text"]).removesuffix("\n") + "\n"
    assert ask("--prompt", "ab", "-n", "9", "--top-k", "90", "--seed", "4").out != shown.out


def test_a_prompt_may_come_from_a_flag_a_file_or_standard_input(ask: Ask, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"ab\r\n")  # the line end is no part of it
    expected = ask("--prompt", "ab", "-n", "4").out
    for way in (["--prompt-file", str(file)], []):
        assert ask(*way, "-n", "4", stdin=b"other" if way else b"ab\n").out == expected
    assert ask("-n", "4", "--json").json["prompt"] == {"text": "", "ids": []}


def test_samples_are_shown_one_after_the_other(ask: Ask) -> None:
    words = ("--prompt", "ab", "-n", "5", "--samples", "3")
    texts = [printable(sample["text"]).removesuffix("\n") for sample in ask(*words, "--json").json["samples"]]
    lines = [f"--- sample {number} of 3 ---\nab{text}\n" for number, text in enumerate(texts, start=1)]
    assert len(set(texts)) == 3
    assert ask(*words).out == "".join(lines)


def test_stop_strings_end_a_sample_and_the_model_may_not(ask: Ask) -> None:
    words = ("--prompt", "ab", "-n", "20", "--ignore-end", "--json")
    (sample,) = ask(*words).json["samples"]
    stop = sample["text"][3:5]
    (stopped,) = ask(*words, "--stop", "never", "--stop", stop).json["samples"]
    assert stopped["end"] == "stop" and stopped["text"] == sample["text"][: sample["text"].index(stop)]


def test_a_model_without_a_tokenizer_speaks_in_ids(ask: Ask) -> None:
    done = ask("--tokenizer", "none", "--prompt", "97 98", "-n", "3")
    ids = ask("--prompt", "ab", "-n", "3", "--json").json["samples"][0]["ids"]
    assert done.out == " ".join(map(str, [97, 98, *ids])) + " \n"
    for prompt, named in (("1 x", "--prompt: x "), ("9" * 5000, "--prompt: "), ("257", "prompt: has the id 257")):
        refused = ask("--tokenizer", "none", "--prompt", prompt)
        assert refused.status == 2 and named in refused.err


def test_past_the_last_position_it_says_what_was_dropped(ask: Ask) -> None:
    done = ask("-n", "50", "--ignore-end", "--json")
    assert done.json["dropped"] == [{"position": 32, "kept": 16}, {"position": 49, "kept": 16}]
    assert "at new token 33, 50" in done.err
    long = ask("--prompt", "a" * 40, "-n", "2", "--json")
    assert long.json["dropped"] == [{"position": 0, "kept": 23}] and "at new token 1" in long.err


def test_probabilities_are_those_of_what_was_drawn(ask: Ask) -> None:
    found = ask("--prompt", "abc", "-n", "4", "--probs", "3", "--json").json
    assert [each["token"] for each in found["tokens"]] == [*b"abc", *found["samples"][0]["ids"]]
    assert all(len(each["candidates"]) == 3 for each in found["tokens"])
    logprobs = [each["logprob"] for each in found["tokens"]]
    np.testing.assert_allclose(logprobs[3:], found["samples"][0]["logprobs"], atol=1e-5)
    table = ask("--prompt", "abc", "--probs", "3").out
    assert len(table.splitlines()[-4:]) == 4 and '"c"' in table.splitlines()[-2]


def test_heads_are_drawn_into_a_file(ask: Ask, tmp_path: Path) -> None:
    file = tmp_path / "heads.svg"
    assert ask("--prompt", "ab", "--attention", str(file), "--layer", "1").status == 0
    assert b"layer 1" in file.read_bytes()
    assert ask("--prompt", "ab", "--attention", str(file), "--layer", "2").status == 2


def test_a_session_reads_its_turns_from_standard_input(ask: Ask) -> None:
    done = ask("--interactive", "-n", "3", stdin=b"ab\n")
    assert done.status == 0 and done.out == ask("--prompt", "ab", "-n", "3").out


def test_ctrl_c_keeps_the_text_so_far(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    def add(screen: answer.Screen, drawn: Any) -> None:
        screen_add(screen, drawn)
        if drawn.position == 2:
            signal.raise_signal(signal.SIGINT)

    screen_add = answer.Screen.add
    full = ask("--tokenizer", "none", "-n", "9").out
    monkeypatch.setattr(answer.Screen, "add", add)
    done = ask("--tokenizer", "none", "-n", "9")
    assert done.status == 130
    assert done.out.split() == full.split()[:3] and done.out.endswith("\n")
    assert "stopped" in done.err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--prompt", ""], "--prompt: "),
        (["--prompt-file", "/none"], "--prompt-file /none: "),
        (["-n", "0"], "--tokens 0: "),
        (["--samples", "1000000000"], "--samples 1000000000: "),
        (["--stop", ""], "--stop: "),
        (["--step", "3"], f"{MODEL}: "),
        (["--probs", "258", "--prompt", "a"], "--probs 258: "),
        (["--attention", "a.png"], "--attention: "),
        (["--serve", "99999"], "--serve 99999: "),
        (["--unknown"], "--unknown: unknown flag; --help"),
        (["-t=0.5"], "-t: unknown flag"),
        (["def read"], "'def read': a value without a flag; --help"),
    ],
    ids=" ".join,
)
def test_bad_input_is_one_line(words: list[str], named: str, ask: Ask) -> None:
    done = ask(*words)
    assert (done.status, done.out) == (2, "")
    (line,) = done.err.splitlines()
    assert line.startswith(f"llmc-jax generate: {named}")


def test_a_prompt_that_is_not_utf_8_names_its_file_and_byte(ask: Ask, tmp_path: Path) -> None:
    file = tmp_path / "latin.txt"
    file.write_bytes(b"ab\xff")
    done = ask("--prompt-file", str(file), "-n", "1", "--json")
    assert done.json["prompt"]["ids"] == [97, 98, 255]  # the bytes tokenizer takes any
    table = tmp_path / "table.bin"
    write_tokenizer_bin(table, (*(bytes([value]) for value in range(256)), b"<|end|>"), 256)
    done = ask("--prompt-file", str(file), "--tokenizer", str(table))
    assert done.status == 2 and f"{file}: " in done.err and "byte 2" in done.err


def test_the_defaults_are_those_of_sampling() -> None:
    """Named twice, because --help and mistakes in the flags do without JAX."""
    defaults = vars(parse([MODEL]))
    assert {name: defaults[name] for name in Sampling._fields} == Sampling()._asdict()


def test_a_number_may_be_left_out() -> None:
    asked = parse(["runs/a", "--probs"])
    assert (asked.checkpoint, asked.probs, asked.tokens) == (Path("runs/a"), 5, 1)
    assert parse(["runs/a", "--serve"]).serve == 8000
    with pytest.raises(InputError, match="CHECKPOINT"):
        parse(["--probs", "3"])


@pytest.mark.parametrize(
    ("words", "texts"),
    [((), {1}), (("--samples", "16"), {16}), (("--samples", "35"), {16, 3}), (("--serve",), {1, 8})],
)
def test_kernels_are_compared_with_as_many_texts_as_they_get(words: tuple[str, ...], texts: set[int]) -> None:
    assert texts_of_kernels(parse(["d12", "--kernels", "pallas", *words])) == texts


def test_kernels_that_cannot_be_are_refused(ask: Ask) -> None:
    for words, named in (((), "NVIDIA"), (("--samples", "65"), "NVIDIA"), (("--attention", "x.png"), "--attention")):
        found = ask("--kernels", "pallas", *words)
        assert found.status == 2 and named in found.err
    with pytest.raises(InputError, match="--samples 65"):
        texts_of_kernels(parse(["d12", "--kernels", "pallas", "--samples", "65"]))
