"""Ask a trained model: llmc-jax generate --help. The flags are in flags.py.

Standard output gets the text, or the one JSON object; notes go to standard error. JAX is imported when it is needed.
"""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from llmc_jax.base.errors import ExitCode, InputError
from llmc_jax.base.files import refusing
from llmc_jax.base.kit import command_line, print_json
from llmc_jax.base.streams import print_error
from llmc_jax.config.model import CAUSAL, attention_of
from llmc_jax.data.documents import read_text
from llmc_jax.generate.flags import parse
from llmc_jax.generate.text import typed_ids, with_pieces
from llmc_jax.machine.device import describe_device, device_label, refusing_full_memory
from llmc_jax.machine.gpus import this_machine
from llmc_jax.machine.jax_setup import configure, settle

if TYPE_CHECKING:
    from llmc_jax.generate.answer import Answer
    from llmc_jax.generate.engine import Request
    from llmc_jax.generate.model import Model
    from llmc_jax.generate.sampling import Sampling


MOST_OF_KERNELS = 64  # texts


@command_line("generate")
def main(words: Sequence[str]) -> int:
    """Run `llmc-jax generate`."""
    asked = parse(words)
    place, data = written_prompt(asked)
    for note in settle() + configure(tf32=asked.dtype != "fp32", devices=1):
        say("note", note)
    from llmc_jax.generate import sampling
    from llmc_jax.generate.checked import checked
    from llmc_jax.generate.model import open_model

    sampling.check(sampling_of(asked))  # before a large model is read
    model = open_model(
        asked.checkpoint, dtype=asked.dtype, tokenizer=asked.tokenizer, step=asked.step, model_file=asked.model_file,
        target=kernels_target() if asked.kernels == "pallas" else None,
    )  # fmt: skip
    ids = prompt_ids(model, place, data)
    if asked.kernels == "pallas":
        with refusing_full_memory("lower --samples, or leave out --kernels pallas"):
            model = checked(model, texts_of_kernels(asked))
    question = next((each for each in QUESTIONS if each in asked.given), None)
    return QUESTIONS.get(question or "", continue_text)(model, ids, asked)


def kernels_target() -> str:
    """Return the architecture whose kernels make new tokens here. Raises InputError where there are none."""
    machine = this_machine()
    if machine.target is None:
        raise InputError(f"--kernels pallas: needs an NVIDIA GPU from Ampere on; this is {machine.kind}; leave it out")
    return machine.target


def texts_of_kernels(asked: argparse.Namespace) -> set[int]:
    """Return with how many texts the kernels will be called. Raises InputError for more than they are good for."""
    from llmc_jax.generate.page import WHOLE
    from pallas_kernels.decode import TEXTS

    if asked.serve is not None:
        return {1, WHOLE["samples"][2]}  # the least and the most of the page
    if asked.samples > MOST_OF_KERNELS:
        raise InputError(
            f"--samples {asked.samples}: --kernels pallas reads all weights again for every {TEXTS} texts, and takes "
            f"up to {MOST_OF_KERNELS}; leave it out"
        )
    return {min(asked.samples, TEXTS), asked.samples % TEXTS} - {0}


def say(about: str, words: str) -> None:
    """Print a note beside the text, on standard error."""
    print_error(f"{about:<7} {words}")


# ----- the prompt ---------------------------------------------------------------------------------------------------


def written_prompt(asked: argparse.Namespace) -> tuple[str, bytes]:
    """Return where a prompt was given, and its bytes, none for a new text. Raises InputError for one that is empty."""
    if asked.prompt is not None:
        place, data = "--prompt", os.fsencode(asked.prompt)
    elif asked.prompt_file is not None:
        place = f"--prompt-file {asked.prompt_file}"
        with refusing(f"{place}: cannot be read", "check the path"), open(asked.prompt_file, "rb") as file:
            data = _without_line_end(read_text(file, place))
    elif {"interactive", "serve"} & asked.given or sys.stdin is None or sys.stdin.isatty():
        return "", b""
    else:
        return "standard input", _without_line_end(read_text(sys.stdin.buffer, "standard input"))
    if not data:
        raise InputError(f"{place}: is empty; without a prompt the model starts a new text")
    return place, data


def _without_line_end(data: bytes) -> bytes:
    """Return a text without the line end that editors and `echo` put behind it."""
    return data.removesuffix(b"\n").removesuffix(b"\r") or data


def prompt_ids(model: "Model", place: str, data: bytes) -> tuple[int, ...]:
    """Return the ids of a prompt; where the model has no tokenizer those that it lists. Raises InputError."""
    try:
        return typed_ids(model.tokenizer, data, place)
    except InputError as error:
        lacks = f"{error}; the model has no tokenizer: {model.tokenizer_note}"
        raise InputError(lacks if model.tokenizer is None else f"{place}: {error}") from error


# ----- what is said of the model and of the answer ------------------------------------------------------------------


def say_model(model: "Model") -> None:
    """Say what a model is, in one line, and what is odd about it; when all that was asked has been checked."""
    from llmc_jax.checkpoint.convert import KINDS
    from llmc_jax.models.layout import num_parameters

    c, step = model.config, "" if model.step is None else f", step {model.step}"
    family = "" if c.family == "gpt2" else f", {c.family}"
    other = "" if (spec := attention_of(c)) == CAUSAL else f", {spec.words}"
    none = f"no tokenizer, so text is token ids ({model.tokenizer_note})"
    tokenizer = none if model.tokenizer is None else f"tokenizer {model.tokenizer_note}"
    say(
        "model",
        f"{model.path}: {KINDS[model.kind]}{step}; {num_parameters(c):,} parameters, T={c.max_seq_len} "
        f"V={c.vocab_size}{other}{family}; {tokenizer}; {model.dtype} on {device_label(describe_device())}",
    )
    for warning in model.warnings:
        say("warning", warning)


def model_facts(model: "Model") -> dict[str, Any]:
    """Return what a model is, for JSON."""
    from llmc_jax.models.family import shape_to_json
    from llmc_jax.models.layout import num_parameters

    return {
        "path": str(model.path),
        "kind": model.kind,
        "step": model.step,
        "shape": shape_to_json(model.config),
        "parameters": num_parameters(model.config),
        "dtype": model.dtype,
        "attention": attention_of(model.config)._asdict(),
        "tokenizer": None if model.tokenizer is None else model.tokenizer_note,
        "end_of_text": model.end_of_text,
        "device": device_label(describe_device()),
        "warnings": model.warnings,
    }


def say_end(model: "Model", request: "Request", answer: "Answer") -> None:
    """Say how an answer came to its end, how long it took, and what was dropped."""
    ends = Counter(sample.end for sample in answer.samples)
    why = ", ".join(f"{times} x {end}" if len(answer.samples) > 1 else end for end, times in ends.items())
    rate = "" if answer.rate is None else f", then {answer.rate:,.0f} tokens/s"
    count = f"{answer.tokens:,} token{'s' * (answer.tokens != 1)}"
    say("ended", f"{why}; {count}, the first after {answer.first:.2f} s{rate}")
    if answer.drops:
        places = ", ".join(str(drop.position + 1) for drop in answer.drops[:3]) + ", …" * (len(answer.drops) > 3)
        T, times = model.config.max_seq_len, f"{len(answer.drops)} time{'s' * (len(answer.drops) > 1)}"
        say("note", f"the text outgrew the model's T={T} {times}: its oldest tokens are dropped at new token {places}")


# ----- continuing a text --------------------------------------------------------------------------------------------


def request_of(model: "Model", ids: tuple[int, ...], asked: argparse.Namespace) -> "Request":
    """Return what the flags ask for, checked; then say what the model is. Raises InputError."""
    from llmc_jax.generate.engine import Request, check_request

    request = Request(ids, asked.tokens, asked.samples, sampling_of(asked), tuple(asked.stop), asked.ignore_end)
    check_request(model, request)
    say_model(model)
    return request


def sampling_of(asked: argparse.Namespace) -> "Sampling":
    """Return how the flags want tokens to be drawn."""
    from llmc_jax.generate.sampling import Sampling

    return Sampling(**{name: getattr(asked, name) for name in Sampling._fields})


def continue_text(model: "Model", ids: tuple[int, ...], asked: argparse.Namespace) -> int:
    """Continue the prompt and show one sample as it comes, several when all have ended; or as one JSON object."""
    from llmc_jax.data.tokenizers import sample_text
    from llmc_jax.generate.answer import Screen, ask, until_ctrl_c

    request, prompt = request_of(model, ids, asked), sample_text(model.tokenizer, ids)
    with until_ctrl_c() as stop:
        if asked.json or request.samples > 1:
            found = ask(model, request, stop=stop)
        else:
            with Screen(sys.stdout, prompt) as screen:
                found = ask(model, request, screen.add, stop)
    if asked.json:
        print_json(answer_facts(model, request, found))
    elif request.samples > 1:
        for number, sample in enumerate(found.samples, 1):
            print(f"--- sample {number} of {request.samples} ---")
            with Screen(sys.stdout, prompt) as screen:
                screen.write(sample.text)
    say_end(model, request, found)
    return ExitCode.STOPPED if stop.is_set() else ExitCode.DONE


def answer_facts(model: "Model", request: "Request", answer: "Answer") -> dict[str, Any]:
    """Return all about an answer, for JSON."""
    from llmc_jax.generate.text import TextStream

    stream = TextStream(model.tokenizer)
    prompt = "".join(map(stream.add, request.prompt)) + stream.finish()
    settings = {
        **request.sampling._asdict(),
        **{name: getattr(request, name) for name in ("tokens", "samples", "stops", "ignore_end")},
    }
    return {
        "model": model_facts(model),
        "prompt": {"text": prompt, "ids": request.prompt},
        "settings": settings,
        "samples": [vars(sample) for sample in answer.samples],
        "dropped": [drop._asdict() for drop in answer.drops],
        "tokens": answer.tokens,
        "first_token_seconds": answer.first,
        "tokens_per_second": answer.rate,
    }


# ----- other questions ----------------------------------------------------------------------------------------------


def show_probabilities(model: "Model", ids: tuple[int, ...], asked: argparse.Namespace) -> int:
    """Show what the model thinks of each token of the prompt and of what it adds: `--probs`."""
    from llmc_jax.data.tokenizers import sample_text
    from llmc_jax.generate.answer import ask, until_ctrl_c
    from llmc_jax.generate.look import look, probability_table

    if asked.probs > model.config.vocab_size:
        raise InputError(f"--probs {asked.probs}: it must be from 0 to V={model.config.vocab_size}")
    request = request_of(model, ids, asked)
    with until_ctrl_c() as stop:
        answer = ask(model, request, stop=stop)
    added = answer.samples[0].ids
    seen = look(model, ids[:1], asked.probs)  # as the beginning of a text; the others as the model was asked
    seen += look(model, [*ids[1:], *added], asked.probs, before=ids[0] if ids else None)
    if asked.json:
        tokens = [{"position": at, **with_pieces(model.tokenizer, each)} for at, each in enumerate(seen)]
        print_json({**answer_facts(model, request, answer), "tokens": tokens})
    else:
        table = probability_table(model.tokenizer, seen)
        print(sample_text(model.tokenizer, [*ids, *added]), table, sep="\n\n")
    say_end(model, request, answer)
    return ExitCode.STOPPED if stop.is_set() else ExitCode.DONE


def draw_heads(model: "Model", ids: tuple[int, ...], asked: argparse.Namespace) -> int:
    """Draw what a layer's heads look at in the prompt: `--attention`."""
    from llmc_jax.generate.heads import draw_text_attention

    if not ids:
        raise InputError("--attention: needs a text; give one by --prompt")
    say_model(model)
    draw_text_attention(asked.attention, model, ids, asked.layer)
    print(asked.attention)
    return ExitCode.DONE


def converse(model: "Model", ids: tuple[int, ...], asked: argparse.Namespace) -> int:
    """Let the user and the model write a text in turns: `--interactive`."""
    from llmc_jax.generate.answer import HELP, talk

    request = request_of(model, ids, asked)
    if sys.stdin.isatty():
        say("note", HELP)
    talk(model, request, sys.stdout, partial(say, "note"))
    return ExitCode.DONE


def serve_page(model: "Model", ids: tuple[int, ...], asked: argparse.Namespace) -> int:
    """Answer on a page of this machine until Ctrl-C: `--serve`."""
    from llmc_jax.generate.serve import Server, serve  # here, for tornado

    def ready(server: Server) -> None:
        say_model(model)
        print(server.address, flush=True)
        say("note", "open this address in a browser on this machine; Ctrl-C stops it")

    serve(model, asked.serve, ready=ready)
    return ExitCode.DONE


QUESTIONS = {
    "interactive": converse,
    "serve": serve_page,
    "probs": show_probabilities,
    "attention": draw_heads,
}
