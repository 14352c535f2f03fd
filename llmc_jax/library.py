"""What `import llmc_jax` offers: open a model, ask it, differentiate it, train it, save it, plan a run.

docs/library.md shows it.

Plain functions on plain data; each is a few lines above what the programs are made of, with its input checked. Leaves
out several devices, the handwritten kernels and everything that a run keeps in its folder: train.py has those.

    B rows, n ids in a row, T the most positions that the model knows, V its vocabulary
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from llmc_jax.base.errors import InputError
from llmc_jax.base.files import refuse_existing
from llmc_jax.checkpoint.llmc import FILES, write_model
from llmc_jax.checkpoint.source import gpt2_shape
from llmc_jax.config.model import ModelShape
from llmc_jax.config.train import OPTIMIZER, OPTIONS, TrainConfig
from llmc_jax.data.tokenizers import Tokenizer
from llmc_jax.generate import heads
from llmc_jax.generate.engine import Drawn, Request, generate
from llmc_jax.generate.model import Model, flat_weights, open_model
from llmc_jax.generate.sampling import Sampling
from llmc_jax.generate.scorer import LOSSES, scores_of_batch
from llmc_jax.models import program
from llmc_jax.models.execution import PLAIN
from llmc_jax.models.layout import views
from llmc_jax.models.program import head_of, loss_fn, separated
from llmc_jax.plan.plan import step_numbers
from llmc_jax.training.rules import named
from llmc_jax.training.state import DTYPES, TrainState, initial_state
from llmc_jax.training.step import Metrics, StepOptions, train_step

if TYPE_CHECKING:
    from llmc_jax.plan.answer import Answer

Ids = Sequence[int] | Sequence[Sequence[int]] | np.ndarray | jax.Array
Step = Callable[[TrainState, Ids], tuple[TrainState, Metrics]]


def load(
    path: str | Path,
    *,
    dtype: str = "auto",
    tokenizer: str = "auto",
    step: int | None = None,
    model_file: str = "",
) -> Model:
    """Open a checkpoint: of llm.c, a run of train.py or its state_… folder, of Hugging Face's, or nanoGPT's ckpt.pt.

    "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl" and "hf:OWNER/NAME" are downloaded from Hugging Face if need be. A
    shape such as "d12" or "L4-NH4-C128-V257-T128" stands for random weights, always the same. dtype, that the model
    computes in: fp32, bf16 or fp16; auto: bf16 on a GPU, fp32 on a CPU. tokenizer: bytes, gpt2 (its table may be
    downloaded), none, or the path of llm.c's gpt2_tokenizer.bin; auto: the model's own where it can be told, without a
    network. step: of a run's folder, this checkpoint, not the newest good one. model_file: the Python file of a
    model of your own.
    Raises InputError, or its subclass FormatError for a file's contents, where it cannot be opened, the tokenizer does
    not fit, or the weights need more memory than there is. docs/checkpoints.md has the formats and their sources.
    """
    if dtype not in (known := ("auto", *DTYPES)):
        raise InputError(f"dtype={dtype!r}: expected one of {', '.join(known)}")
    return open_model(path, dtype=dtype, tokenizer=tokenizer, step=step, model_file=model_file)


# ----- text and ids -------------------------------------------------------------------------------------------------


def encode(model: Model, text: str | bytes) -> np.ndarray:
    """Return the ids (n,) int32 of a text. The id that begins a text, `model.end_of_text`, is not put before it.

    bytes must be UTF-8, but for the tokenizer of bytes, which takes any. Raises InputError where they are not, and
    where the model has no tokenizer.
    """
    if not isinstance(text, str | bytes):
        raise InputError(f"text: found {type(text).__name__}; encode takes str or bytes")
    return _tokenizer(model).encode(text).astype(np.int32)


def decode(model: Model, ids: Sequence[int] | np.ndarray | jax.Array) -> str:
    """Return the text of ids (n,). Bytes that are no UTF-8, as half a character has them, become U+FFFD.

    Raises InputError for an id that the tokenizer does not have, and where the model has no tokenizer.
    """
    return _tokenizer(model).decode(_array(ids, (1,)).tolist()).decode(errors="replace")


def _tokenizer(model: Model) -> Tokenizer:
    if model.tokenizer is None:
        raise InputError(f"{model.path}: {model.tokenizer_note}; load(…, tokenizer=…) names one, or work with ids")
    return model.tokenizer


def _array(ids: Ids, dimensions: tuple[int, ...]) -> np.ndarray:
    """Return ids as an array of so many dimensions. Raises InputError for what is none of whole numbers."""
    try:
        found = np.asarray(ids)
    except ValueError:
        raise InputError("ids: the rows differ in length; all must have as many ids as the first") from None
    whole = np.issubdtype(found.dtype, np.integer) or not found.size
    if found.ndim not in dimensions or not whole:
        allowed = " or ".join({1: "(n,)", 2: "(B, n)", 3: "(A, B, n)"}[n] for n in dimensions)
        raise InputError(f"ids: found {found.dtype} of shape {found.shape}; expected whole numbers {allowed}")
    return found


def _rows(model: Model, ids: Ids, least: int, dimensions: tuple[int, ...] = (1, 2)) -> np.ndarray:
    """Return ids as an array of int32 if the model can take them: at least so many in a row. Raises InputError."""
    rows = _array(ids, dimensions)
    V, T = model.config.vocab_size, model.config.max_seq_len
    if not least <= rows.shape[-1] < T + least or not rows.size:
        most = T + least - 1
        raise InputError(f"ids: found {rows.shape[-1]:,} in a row; expected {least} to {most} (the model knows {T})")
    if not 0 <= rows.min() <= rows.max() < V:
        wrong = rows.min() if rows.min() < 0 else rows.max()
        raise InputError(f"ids: found {wrong}; this model's are 0 to {V - 1}")
    return rows.astype(np.int32)


# ----- what the model computes --------------------------------------------------------------------------------------


def logits(model: Model, ids: Ids) -> jax.Array:
    """Return the logits (n, V) float32: row i is about the id after ids[0], …, ids[i]. Of ids (B, n), (B, n, V).

    n is 1 to T; each other shape is another program to compile. `jax.nn.softmax` makes probabilities of them. Raises
    InputError for ids that the model cannot take. Source: llm.c train_gpt2.c, `gpt2_forward`.
    """
    rows = _rows(model, ids, 1)
    found = _logits(model.weights, np.atleast_2d(rows), model.config)
    return found.reshape(*rows.shape, model.config.vocab_size)


@partial(jax.jit, static_argnames="config")
def _logits(weights: Any, rows: jax.Array, config: ModelShape) -> jax.Array:
    return program.logits(weights, rows, config, PLAIN)[..., : config.vocab_size].astype(jnp.float32)


def loss(model: Model, ids: Ids) -> float:
    """Return the mean cross-entropy, nats per token, of ids (n,) or (B, n): each but the first, given those before it.

    n is 2 to T + 1. Raises InputError for ids that the model cannot take.
    Source: llm.c train_gpt2.c, `crossentropy_forward`.
    """
    rows = np.atleast_2d(_rows(model, ids, 2))
    inputs, targets = rows[:, :-1], rows[:, 1:]
    all_of_them = np.array([0, targets.size], np.int32)
    at_once = LOSSES._replace(logit_bytes=1 << 62)  # as in training; in parts a prime number of rows would be slow
    losses, *_ = scores_of_batch(model.weights, inputs, targets, all_of_them, model.config, PLAIN, at_once)
    return float(jnp.mean(losses))


def loss_and_gradient(model: Model, ids: Ids) -> tuple[float, Any]:
    """Return what `loss` returns, and its gradient: 16 tensors by name, in the dtype that the model computes in.

    Tensors of the layers have those along their first axis, so `gradient.qkvw[layer]` is the gradient of
    `model.weights.qkvw[layer]`. It is computed by the backward pass written out in llmc_jax/models/gpt2/model.py.
    Raises InputError for ids that the model cannot take. Source: llm.c train_gpt2.c, `gpt2_backward`.
    """
    rows = np.atleast_2d(_rows(model, ids, 2))
    found, gradient = _loss_and_gradient(model.weights, rows, model.config)
    return float(found), gradient


def attention_weights(model: Model, ids: Sequence[int] | np.ndarray | jax.Array, layer: int) -> np.ndarray:
    """Return what each head of a layer takes of each position, (NH, n, n) float32, for ids (n,): 1 to T of them.

    Row i holds the weights with which position i takes the values of the positions up to itself; the others are 0. Rows
    of softmax attention add up to 1. Raises InputError for ids or a layer that the model does not have.
    Source: llm.c train_gpt2.c, `attention_forward`.
    """
    return heads.attention_weights(model, _rows(model, ids, 1, (1,)).tolist(), layer)


@partial(jax.jit, static_argnames="config")
def _loss_and_gradient(weights: Any, rows: jax.Array, config: ModelShape) -> tuple[jax.Array, Any]:
    flat = flat_weights(weights, config)
    found, gradient = jax.value_and_grad(loss_fn)(flat, rows[:, :-1], rows[:, 1:], config, PLAIN)
    return found, views(gradient, config)


# ----- generating ---------------------------------------------------------------------------------------------------


class Completion(NamedTuple):
    """What a model has written after a prompt. text holds nothing of the prompt, ids and logprobs every new token.

    logprobs: natural logarithms, of the model's own distribution at temperature 1, nothing left out. end: why it ends,
    "end of text", "stop" or "length". Without a tokenizer the text is the ids, a space behind each.
    """

    text: str
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    end: str


def complete(model: Model, prompt: str | bytes | Ids = "", *, tokens: int = 64, **how: Any) -> Completion:
    """Return what the model writes after a prompt, of at most so many tokens.

    how: temperature, top_k, top_p, seed and stops, as for `stream`, which also says what a prompt may be, and what
    raises InputError.
    """
    drawn = list(stream(model, prompt, tokens=tokens, **how))
    ids, logprobs = tuple(each.token for each in drawn), tuple(each.logprob for each in drawn)
    return Completion("".join(each.text for each in drawn), ids, logprobs, drawn[-1].end)


def stream(
    model: Model,
    prompt: str | bytes | Ids = "",
    *,
    samples: int = 1,
    tokens: int = 64,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 1337,
    stops: Sequence[str] = (),
) -> Iterator[Drawn]:
    """Yield each new token as it comes; of several samples one after the other at each position.

    prompt: a text, or ids (n,); an empty one begins a text. Each token has `text`, which holds whole characters only,
    `token`, `logprob`, `sample`, `position`, and `end`: why a sample ends here, else "". The same seed gives the same
    tokens, whatever the number of samples, but where a draw lies within rounding of a boundary.

    What is drawn from, in this order: the logits divided by temperature, where 0 takes the likeliest; of the
    probabilities the top_k largest (0: all); the fewest that have top_p together. A sample ends before the first of
    stops, and at the end-of-text token. When T positions are full the oldest half is dropped.
    Raises InputError for a value that cannot be, for ids that the model does not have, and for a text where it has no
    tokenizer. llmc_jax/generate/sampling.py has the sources.
    """
    ids = encode(model, prompt) if isinstance(prompt, str | bytes) else _array(prompt, (1,))
    sampling = Sampling(temperature, index(top_k), top_p, index(seed))
    stops = (stops,) if isinstance(stops, str) else tuple(stops)
    found = generate(model, Request(tuple(ids.tolist()), index(tokens), index(samples), sampling, stops))
    return (each for each in found if isinstance(each, Drawn))


# ----- training -----------------------------------------------------------------------------------------------------


def begin(model: Model, *, steps: int = 0, **options: float | str) -> tuple[TrainState, Step]:
    """Return the state of training before the first step, and the function that makes a step.

    `state, metrics = step(state, ids)` trains on ids (B, n): each but a row's first is a target, so B * (n - 1) of
    them, n at most T + 1. Of ids (A, B, n) the gradients of A micro-batches are added up for one update. The step uses
    up the state that it is given. metrics: `loss` before the step, `norm` of the gradient before clipping,
    `learning_rate`, `finite` (False: nothing was updated), and a few more, scalars on the device. The first step of
    each shape compiles.

    The model stays as it is; `trained` makes a new one of the state. options: learning_rate, schedule, optimizer and
    what else the group Optimizer of docs/flags.md has, with train.py's names, meanings and defaults, which are llm.c's.
    steps: of the whole training, over which the rate takes its course; 0: it stays as it is after the warm-up. A model
    in bf16 or fp16 is trained with float32 master weights; load(…, dtype="fp32") trains in float32.
    Raises InputError, here for an option that cannot be, and in a step for ids that the model cannot take.
    Source: llm.c train_gpt2.cu, `gpt2_update`.
    """
    of_step = (each for each in OPTIONS if each.group == OPTIMIZER and each.reaches & {"program", "numbers"})
    known = [each.name for each in of_step if each.resume != "must match"]  # which are those of a range test
    if other := [name for name in options if name not in known]:
        raise InputError(f"there is no option {other[0]!r} of a step; there are {', '.join(known)}")
    config = TrainConfig.from_json({"max_steps": steps, **options})
    if config.final_lr_fraction != 1.0 and steps < 1:
        raise InputError(f"final_lr_fraction={config.final_lr_fraction}: needs steps=…, after how many it is reached")
    scale = config.loss_scale if model.dtype == "fp16" else None
    params = flat_weights(model.weights, model.config).astype(jnp.float32)
    found = named(config.optimizer)
    state = initial_state(params, head_of(model.weights, model.config).dtype, loss_scale=scale, optimizer=found)
    numbers = step_numbers(config, found, steps)
    chosen = StepOptions(config.schedule, config.decay if config.weight_decay else "none", PLAIN, optimizer=found)

    def step(state: TrainState, ids: Ids) -> tuple[TrainState, Metrics]:
        rows = _rows(model, ids, 2, (2, 3))
        rows = rows if rows.ndim == 3 else rows[None]
        return train_step(state, rows[..., :-1], rows[..., 1:], numbers, model.config, chosen)

    return state, step


def trained(model: Model, state: TrainState) -> Model:
    """Return the model with the weights of a training state, which `begin` made from it and steps have changed."""
    return model._replace(weights=separated(state.weights, model.config), step=int(state.step))


def save(model: Model, path: str | Path, *, force: bool = False) -> None:
    """Write a model as llm.c's model file, which `load`, `train.py -e` and llm.c itself read.

    In bf16 where the model computes in bf16 (version 5), otherwise in fp32 (version 3). It holds neither a tokenizer
    nor the optimizer's buffers. The file appears under its name when it is complete. force: replace a file that is
    there. Raises InputError where there is one, and where it cannot be written.
    Source: llm.c train_gpt2.cu, `gpt2_write_to_checkpoint`.
    """
    config = gpt2_shape(model.config, FILES)
    refuse_existing(Path(path), force)
    flat = np.asarray(flat_weights(model.weights, model.config).astype(jnp.float32))
    write_model(path, config, flat, version=5 if model.dtype == "bf16" else 3)


# ----- planning -----------------------------------------------------------------------------------------------------


def estimate(
    flags: str | Sequence[str] | TrainConfig,
    *,
    gpu: str | None = None,
    devices: int = 0,
    quick: bool = True,
    tokens: float | None = None,
    price: float | None = None,
    network: float | None = None,
) -> "Answer":
    """Return whether train.py's flags fit on a GPU, how fast a step is, how long a run takes and what it costs.

    flags: as one types them; the data need not be there. gpu: a short name such as "h100", or the driver's name; None:
    the device at hand. devices: how many; 0: as flags say, or one. quick:
    compile nothing, otherwise memory is that of the compiled program. tokens: to train on, in place of -x. price: USD
    for an hour of one GPU. network: Gbit/s of each GPU between machines.

    The answer is a named tuple of named tuples: `memory` (with `fits`), `step` (with `seconds` and
    `tokens_per_second`), `course` (None where nothing says how many steps), `largest` (-b by way of computing) and
    more. An interval has `low`, `typical` and `high`. docs/plan.md says where each figure comes from. Raises InputError
    for what cannot run there.
    """
    from llmc_jax.plan.answer import Wishes, answer  # here, because all else does without
    from llmc_jax.plan.asked import asked_config

    config = flags if isinstance(flags, TrainConfig) else asked_config(flags)
    config = replace(config, devices=devices) if devices else config
    return answer(config, gpu, Wishes(quick, tokens, price, network))
