"""The weights of attention: what each head of one layer looks at in a text, as numbers and as a picture.

XLA's operations compute them, whatever the model was trained with: the kernels of attention never hold the T x T
matrix. matplotlib is imported when a picture is drawn, and used without pyplot, so that no display is touched.
"""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llmc_jax.base.errors import InputError
from llmc_jax.base.pictures import drawable, save_figure
from llmc_jax.config.model import CAUSAL, ModelShape, attention_of
from llmc_jax.generate.engine import check_ids, prompt_size
from llmc_jax.generate.look import label
from llmc_jax.generate.model import Model
from llmc_jax.models.execution import PLAIN
from llmc_jax.models.layout import num_layers
from llmc_jax.models.program import program_of
from llmc_jax.ops.attention import document_starts, seen

MOST_LABELS = 40  # of more tokens only positions are written
LABEL_INCHES = 0.135
LONGEST_LABEL = 14
PANEL_INCHES = 2.1  # at least
LARGEST = 0.001  # the part of the weights that may be beyond the scale of colours
COLORS = "cividis"  # as good for every kind of colour vision


def attention_weights(model: Model, ids: Sequence[int], layer: int) -> np.ndarray:
    """Return the weights (NH, T, T) float32 of each head of a layer, for a text of T tokens as it stands.

    Row t is what position t takes of each position u <= t; beyond it is 0. Rows of softmax attention sum to 1, those of
    relu attention to anything. In bf16 the weights are rounded, as the model itself rounds them.
    Raises InputError for a layer or an id that the model does not have, no token, or more than its positions.
    """
    config = model.config
    if program_of(config).attention_weights is None:
        raise InputError(f"--attention: the family {config.family} says nothing of its heads")
    if not 0 <= layer < num_layers(config):
        raise InputError(f"--layer {layer}: the model has layers 0 to {num_layers(config) - 1}")
    length = len(ids)
    if not 1 <= length <= config.max_seq_len:
        raise InputError(
            f"--attention: the text has {length:,} tokens, but the model {config.max_seq_len:,} positions; give a text "
            "that fits"
        )
    tokens = check_ids(config, ids)
    tokens = np.pad(tokens, (0, prompt_size(config, length) - length))  # behind the text, where nobody looks
    found = weights_of_layer(model.weights, tokens, config=config, layer=layer)
    return np.asarray(found)[:, :length, :length]


@partial(jax.jit, static_argnames=("config", "layer"))
def weights_of_layer(weights: Any, tokens: jax.Array, *, config: ModelShape, layer: int) -> jax.Array:
    """Compute the weights (NH, n, n) float32 of one layer's attention to tokens (n,); later layers are not computed."""
    of_layer = program_of(config).attention_weights
    assert of_layer is not None
    return of_layer(weights, tokens[None], config, PLAIN, layer)


def draw_text_attention(path: str | Path, model: Model, ids: Sequence[int], layer: int) -> None:
    """Draw what all heads of a layer look at in a text, with the end-of-text token before it as for `look`.

    Raises InputError as `attention_weights` does.
    """
    tokens = [model.end_of_text, *ids]
    weights = attention_weights(model, tokens, layer)
    spec = attention_of(model.config)
    kind = "attention" if spec == CAUSAL else spec.words
    title = f"{kind} of layer {layer} (of 0 to {num_layers(model.config) - 1}), {len(tokens)} tokens"
    labels = [label(model.tokenizer, token).removeprefix('"').removesuffix('"').replace(" ", "␣") for token in tokens]
    starts = document_starts(jnp.array([tokens]), spec.documents) if spec.documents >= 0 else None
    hidden = ~np.asarray(seen(spec, len(tokens), starts)).reshape(len(tokens), -1)
    draw_attention(path, weights, labels, title, hidden)


def draw_attention(
    path: str | Path, weights: np.ndarray, labels: Sequence[str], title: str, hidden: np.ndarray
) -> None:
    """Draw the weights (NH, T, T) of a layer's heads, a panel each, into a PNG, SVG or PDF by the file's ending.

    Rows are the positions that look, columns those looked at; what is hidden (T, T) from a position is left white.
    One scale of colours holds for all panels; it is that of the square root, so that small weights can be told from
    none, and ends where all but the largest LARGEST lie within: the first positions of a text, which see few others,
    have large weights. labels: of the T tokens, written where there are few. The file appears complete or not at all.
    """
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    heads, T, _ = weights.shape
    columns = math.ceil(math.sqrt(heads))  # a little wider than high, and no row empty
    rows = -(-heads // columns)
    panel = max(PANEL_INCHES, LABEL_INCHES * T) if T <= MOST_LABELS else PANEL_INCHES * 1.4
    figure = Figure(figsize=(columns * panel + 1.9, rows * (panel + 0.25) + 1.3), dpi=110, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    shown = np.nan_to_num(weights[:, ~hidden])
    largest = float(np.quantile(shown, 1 - LARGEST, method="higher")) or float(shown.max()) or 1.0
    norm = PowerNorm(0.5, 0.0, largest, clip=True)
    image: Any = None
    for index, axes in enumerate(panels[:heads]):
        image = axes.imshow(np.ma.masked_array(weights[index], hidden), cmap=COLORS, norm=norm)
        axes.set_title(f"head {index}", fontsize=9)
        axes.spines[:].set_visible(False)
        axes.tick_params(labelsize=7)
        if T <= MOST_LABELS:
            _name_positions(axes, labels)
        axes.label_outer()
    for axes in panels[heads:]:
        axes.set_axis_off()
    bar = figure.colorbar(image, ax=panels.tolist(), fraction=0.03, aspect=30, pad=0.01, format="%.2g", extend="max")
    bar.set_label("weight", fontsize=9)
    bar.ax.tick_params(labelsize=8)
    figure.suptitle(drawable(title), fontsize=12, fontweight="bold", parse_math=False)
    figure.supxlabel("position that is looked at", fontsize=9)
    figure.supylabel("position that looks", fontsize=9)
    save_figure(figure, Path(path))


def _name_positions(axes: Any, labels: Sequence[str]) -> None:
    """Write the tokens beside and under a panel."""
    words = [drawable(each if len(each) <= LONGEST_LABEL else f"{each[: LONGEST_LABEL - 1]}…") for each in labels]
    axes.set_yticks(range(len(words)), words, fontsize=7, parse_math=False)
    axes.set_xticks(range(len(words)), words, fontsize=7, parse_math=False, rotation=90)
    axes.tick_params(length=1.5, pad=1)
