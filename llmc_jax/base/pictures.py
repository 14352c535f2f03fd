"""What all pictures share: colours, which files they may be, and how they are written. Leaves out what is drawn.

matplotlib is imported when a picture is drawn, and used without pyplot, so that no global state and no display is
touched.
"""

import io
from pathlib import Path
from typing import Any

from llmc_jax.base.files import write_atomic
from llmc_jax.base.streams import escaped

# Okabe and Ito's colours for every kind of colour vision, in an order in which the first few lie far apart; their
# yellow is left out, which is hard to see on white.
PALETTE = ("#0072b2", "#d55e00", "#000000", "#e69f00", "#cc79a7", "#56b4e9", "#009e73")
# What a picture's file may end in, and what of its metadata must not be the time: the same picture has the same bytes.
SUFFIXES: dict[str, dict[str, None]] = {".png": {}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}


def drawable(text: str) -> str:
    """Return text with every character escaped that matplotlib's font has no picture of."""
    from matplotlib.font_manager import findfont, get_font

    font = get_font(findfont("DejaVu Sans"))
    return "".join(c if font.get_char_index(ord(c)) else c.encode("unicode_escape").decode() for c in text)


def fitting(figure: Any, words: str, room: float, tail: str = "", **font: Any) -> str:
    """Return words and a tail as a figure can show them, cut at the beginning to so many pixels: ends of names differ.

    font: its size and weight. `$` begins no formula only where the text that shows them has parse_math=False.
    """
    words, cut = drawable(escaped(words)), ""
    text = figure.text(0, 0, words + tail, parse_math=False, **font)
    while len(words) > 1 and (width := text.get_window_extent().width) > room:
        words, cut = words[max(1, int(len(words) * (1 - room / width))) :], "…"
        text.set_text(cut + words + tail)
    text.remove()
    return cut + words + tail


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure of matplotlib into a PNG, SVG or PDF by the file's ending, which appears complete or not at all.

    Raises InputError.
    """
    import matplotlib

    suffix, picture = path.suffix.lower(), io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "llmc_jax"}):  # names in an SVG are the same each time
        figure.savefig(picture, format=suffix[1:], metadata=SUFFIXES[suffix])
    write_atomic(path, picture.getvalue())
