"""The checks of a user's model: its file, its gradients against JAX's, its decoder against `hidden`.

All is computed at a small shape with random weights, and operation by operation, so little is compiled anew when the
file has changed. Leaves out the command line (command.py).
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from llmc_jax.base import own_file
from llmc_jax.base.errors import InputError
from llmc_jax.models import program
from llmc_jax.models.execution import PLAIN, Execution
from llmc_jax.models.family import Family, family_of, parsed, shape_from_json, shape_to_json
from llmc_jax.models.gradients import Gradients, flatten_gradients
from llmc_jax.models.layout import (
    flat_size,
    head_spec,
    pieces,
    separate,
    table_problem,
    tensor_specs,
    tensors_of,
    views,
)

LEVELS = {
    "-r 0": PLAIN, "-r 1": Execution(recompute=1), "-r 2": Execution(recompute=2),
    "--recompute-blocks 1": Execution(recompute_blocks=1), "--recompute-blocks 2": Execution(recompute_blocks=2),
}  # fmt: skip
GRADIENT_LIMIT = 1e-9  # error of a tensor's gradient, relative by norm
STEP, SLOPE_LIMIT = 1e-6, 1e-3  # of each weight of a tensor, between two losses; the error of the slope
DECODER_LIMIT = 1e-9  # largest error of a logit, where these are about 1
LEAST = 1e-5  # of the norm of all gradients: a tensor's below it may be zero but for rounding
WEIGHT = 0.75  # of the loss: one that is left out shows
LONGEST = 64  # positions of a text
Batches = Sequence[tuple[Any, Any]]  # tokens and targets (B, T)


class Compared(NamedTuple):
    """One comparison, by parts: the loss, tensors, functions of a decoder."""

    function: str  # of the program
    level: str
    limit: float
    errors: Mapping[str, float]

    @property
    def wrong(self) -> list[str]:
        """Return the parts with an error above the limit, or NaN."""
        return [name for name, error in self.errors.items() if not error <= self.limit]

    @property
    def worst(self) -> str:
        """Return the part with the largest error."""
        return max(self.errors, key=lambda name: np.nan_to_num(self.errors[name], nan=np.inf))


def check(family: Family, descriptor: str) -> tuple[list[Compared], list[str]]:
    """Return comparisons, and notes, on a family at a shape. Raises InputError for a file that cannot be used."""
    with inside(family):
        try:
            shape = parsed(descriptor, family)
        except ValueError as error:
            words = f"{descriptor} is no shape of {family.name}: give a small one of its own with -e"
            raise InputError(f"{family.path}: {words} ({error})") from None
        check_tensors(family, shape)
        check_program(family, shape)
        check_start(family, shape)
        with jax.enable_x64(True), jax.default_matmul_precision("highest"):
            compared, seen = gradients(shape, batches(shape)), sees_later(shape)
            compared += [decoding(shape)] if seen is None else []
        found, frozen, notes = program.program_of(shape), ", ".join(family.frozen(shape)), []
    if frozen:
        notes.append(f"not compared, for it is frozen: {frozen}")
    if not found.loss:
        notes.append(f"no {', '.join([*LEVELS][1:])}: JAX differentiates this family, and keeps everything")
    if not found.decoder:
        notes.append("no decoder of its own: the text is computed again for each token")
    if seen is not None:
        what = "so training loss and text are not what they seem; no decoder can agree with it, and none is compared"
        notes.append(f"warning: not causal: position {seen} sees later tokens, {what}")
    return compared, notes


# ----- the file -------------------------------------------------------------------------------------------------------


def inside(family: Family) -> AbstractContextManager[None]:
    """Make of what a family's function raises an InputError of one line."""
    return own_file.inside(family.path or Path(family.name), otherwise=place(family, "FAMILY"))


def place(family: Family, meant: Any) -> str:
    """Return the file, and the line of a function that stands there, of the first mention of a name, or of FAMILY."""
    code, path = getattr(meant, "__code__", None), str(family.path)
    names = (re.escape(getattr(meant, "__name__", str(meant))), "^FAMILY")
    lines = [*enumerate(family.content.decode().splitlines(), 1)]
    mentions = (number for name in names for number, line in lines if re.search(rf"(?<!\w){name}(?!\w)", line))
    return f"{path}: line {code.co_firstlineno if code and code.co_filename == path else next(mentions, 1)}"


def need(family: Family, holds: object, meant: Any, words: str) -> None:
    """Raise InputError, with the line of what is meant, unless something holds."""
    if not holds:
        raise InputError(f"{place(family, meant)}: {words}")


def check_tensors(family: Family, shape: Any) -> None:
    """Check the shape of a model and its table of tensors. Raises InputError."""
    must, kind = partial(need, family), family.shape
    try:
        again = shape_from_json(json.loads(json.dumps(shape_to_json(shape))))
    except (TypeError, ValueError) as error:
        again = error
    must(again == shape and hash(again) == hash(shape), kind, f"{shape} by way of JSON, as files keep it: {again}")
    name, words = table_problem(family, shape) or ("", "")
    must(not words, name, f"{name}: {words}")


def check_program(family: Family, shape: Any) -> None:
    """Check that a model's program fits its tensors. Raises InputError. Computes nothing."""
    must, found = partial(need, family), program.program_of(shape)
    if found.block:
        kind, layered = found.block.parameters, [spec.name for spec in tensor_specs(shape) if spec.tensor.layered]
        for has, wants in zip_longest(getattr(kind, "_fields", ()), layered):
            words = f"{kind.__name__} has {has or 'nothing'} where the tensor {wants or 'of no layer'} belongs"
            must(has == wants, kind, f"Block.parameters must be the tensors of a layer in their order; {words}")
    flat, tokens = jax.ShapeDtypeStruct((flat_size(shape),), jnp.float32), batches(shape)[-1][0]
    rows = jax.eval_shape(lambda flat: found.hidden(tensors_of(flat, shape), tokens, shape, PLAIN), flat)
    wanted = (*tokens.shape, head_spec(shape).shape[1])
    must(getattr(rows, "shape", 0) == wanted, found.hidden, f"hidden must give (B, T, C) = {wanted}; it gives {rows}")


def check_start(family: Family, shape: Any) -> None:
    """Check a model's first weights. Raises InputError."""
    must, start, size = partial(need, family), family.initial(shape, 1), flat_size(shape)
    right, given = np.shape(start) == (size,) and start.dtype == np.float32, f"{start.dtype} {np.shape(start)}"
    must(right, family.initial, f"initial must give float32 ({size},); it gives {given}")
    must(np.isfinite(start).all(), family.initial, "initial gives NaN or infinite values")
    V = shape.vocab_size
    words = f"initial must give zeros for the rows of {family.head} from V={V} on"
    must(not getattr(views(start, shape), family.head)[V:].any(), family.initial, words)


def check_step(shape: Any, tokens: tuple[int, int], dtype: Any, execution: Execution, *, splits: bool = False) -> None:
    """Check that a step of training can be made of a user's model. tokens: (B, T) of a run. Computes nothing.

    splits: the state is split over several devices, so that a step is given the tensors. Raises InputError with the
    line of its file.
    """
    family, ids = family_of(shape), jax.ShapeDtypeStruct(tokens, jnp.int32)
    with inside(family):
        check_program(family, shape)
        flat = jax.ShapeDtypeStruct((flat_size(shape),), dtype)
        loss = partial(program.loss_fn, shape=shape, execution=execution)
        jax.eval_shape(jax.value_and_grad(loss), flat, ids, ids)
        if splits:
            tensors = jax.eval_shape(partial(separate, config=shape), flat)
            jax.eval_shape(
                lambda w, x, y: program.loss_and_gradients(w, x, y, shape, execution, 1.0), tensors, ids, ids
            )


# ----- gradients ------------------------------------------------------------------------------------------------------


def random_weights(shape: Any) -> Any:
    """Return weights (flat_size,) as no model starts: no bias is 0, no scale 1."""
    rng, flat = np.random.default_rng(1), np.zeros(flat_size(shape))
    for spec in tensor_specs(shape):
        width = spec.shape[-1] ** -0.5 if spec.tensor.matrix else 0.3
        values = (spec.tensor.start == "one") + width * rng.standard_normal(spec.size)
        flat[spec.offset : spec.offset + spec.size] = values
    return jnp.asarray(flat)


def batches(shape: Any) -> Batches:
    """Return random tokens and targets of two short texts, and of two as long as may be. The id V/2 never occurs."""
    V, T = shape.vocab_size, min(shape.max_seq_len, LONGEST)
    ids = np.random.default_rng(3).integers(0, max(1, V - 1), (2, T + 1))
    ids = jnp.asarray(ids + (ids >= V // 2), np.int32)
    return [(ids[:, :length], ids[:, 1 : length + 1]) for length in (max(1, T // 2 - 1), T)]


def gradients(shape: Any, given: Batches) -> list[Compared]:
    """Return the gradient of `hidden` against slopes, of `loss` against it, `loss_and_gradients` against `loss`.

    The last two at each level of recomputation. Without a `loss`, of the last the first level, against `hidden`.
    """
    flat, at, own_loss = random_weights(shape), trained(shape), program.program_of(shape).loss
    mean: Any = partial(program.mean_loss, shape=shape)

    def made(of: Callable[..., Any]) -> list[Any]:
        jax.eval_shape(of, flat, *given[0])  # as if compiled: no value is known
        return [jax.tree.map(np.asarray, of(flat, *batch)) for batch in given]

    def negated(block: Any) -> Any:  # twice: by `on_block`, which takes each once, and after it
        return tuple(-each for each in block)

    def split(flat: Any, x: Any, y: Any, execution: Execution) -> Any:
        given = flat if execution == PLAIN else separate(flat, shape)  # as several devices have it
        loss, (own, blocks) = program.loss_and_gradients(given, x, y, shape, execution, WEIGHT, negated)
        return loss, flatten_gradients(Gradients(own, tuple(map(negated, blocks))), shape, flat.dtype)

    hidden = made(jax.value_and_grad(mean))
    slopes = _slopes(at, lambda flat: mean(flat, *given[0]), flat, hidden[0][1])
    compared = [Compared("hidden", "-r 0", SLOPE_LIMIT, slopes)]
    right = whole = [(WEIGHT * loss, WEIGHT * gradient) for loss, gradient in hidden]
    for level, execution in [*LEVELS.items()][: None if own_loss else 1]:
        if own_loss:
            whole = made(jax.value_and_grad(partial(program.loss_fn, shape=shape, execution=execution, weight=WEIGHT)))
            compared.append(Compared("loss", level, GRADIENT_LIMIT, _errors(at, whole, right)))
        parts = _errors(at, made(partial(split, execution=execution)), whole)
        compared.append(Compared("loss_and_gradients", level, GRADIENT_LIMIT, parts))
    return compared


def trained(shape: Any) -> dict[str, np.ndarray]:
    """Return where the elements of each tensor stand in the flat buffer, but for those that are frozen."""
    found: dict[str, list[np.ndarray]] = {}
    for piece in pieces(shape):
        if not piece.frozen:
            found.setdefault(piece.spec.name, []).append(np.arange(piece.start, piece.stop))
    return {name: np.concatenate(each) for name, each in found.items()}


def _errors(at: Mapping[str, Any], found: list[Any], expected: list[Any]) -> dict[str, float]:
    """Return the largest relative error over some batches: of the loss, and by norm of each tensor's gradient."""
    errors = dict.fromkeys(("loss", *at), 0.0)
    for (loss, gradient), (right_loss, right) in zip(found, expected, strict=True):
        pairs = {"loss": (loss, right_loss), **{name: (gradient[i], right[i]) for name, i in at.items()}}
        for name, (a, b) in pairs.items():
            error = np.linalg.norm(a - b) / max(np.linalg.norm(b), LEAST * np.linalg.norm(right), 1e-300)
            errors[name] = float(np.maximum(error, errors[name]))  # NaN stays
    return errors


def _slopes(at: Mapping[str, Any], loss: Callable[..., Any], flat: Any, gradient: Any) -> dict[str, float]:
    """Return for each tensor how far the slope of the loss in one direction is from what its gradient says."""
    signs, errors = np.random.default_rng(2).choice((-1.0, 1.0), flat.size), dict[str, float]()
    for name, i in at.items():
        step = np.zeros_like(flat)
        step[i] = STEP * signs[i]
        error = abs((loss(flat + step) - loss(flat - step)) / (2 * STEP) - gradient[i] @ signs[i])
        errors[name] = float(error / max(np.linalg.norm(gradient[i]), LEAST * np.linalg.norm(gradient), 1e-300))
    return errors


# ----- decoding -------------------------------------------------------------------------------------------------------


def sees_later(shape: Any) -> int | None:
    """Return the first position whose row of `hidden` changes with later tokens; None: there is none."""
    params, tokens = tensors_of(random_weights(shape), shape), batches(shape)[-1][0]
    for position in range(tokens.shape[1] - 1):
        two = tokens[:1].repeat(2, axis=0).at[1, position + 1 :].add(1) % shape.vocab_size
        before, after = np.asarray(program.hidden(params, two, shape))[:, position]
        if np.abs(after - before).max() > GRADIENT_LIMIT * np.abs(before).max():
            return position
    return None


def decoding(shape: Any) -> Compared:
    """Return the decoder's logits against those of the whole forward, at each position of two texts."""
    decoder, ((prompt, _), (tokens, _)), flat = program.decoder_of(shape), batches(shape), random_weights(shape)
    T, length = tokens.shape[1], max(1, prompt.shape[1] - 2)
    prompt = jnp.where(jnp.arange(prompt.shape[1]) < length, prompt, 0)  # what stands behind it does not count
    right: Any = program.logits(tensors_of(flat, shape), tokens, shape)[..., : shape.vocab_size]
    params = program.separated(flat, shape)
    found, cache = decoder.prefill(params, prompt, jnp.int32(length), T, shape, PLAIN)
    errors = {"prefill": float(np.abs(found - right[:, length - 1]).max()), "decode": 0.0}
    for at in range(length, T):
        found, cache = decoder.decode(params, tokens[:, at], jnp.int32(at), cache, shape)
        errors["decode"] = float(np.maximum(errors["decode"], np.abs(found - right[:, at]).max()))
    return Compared("decoder", "float64", DECODER_LIMIT * max(1.0, float(np.abs(right).max())), errors)
