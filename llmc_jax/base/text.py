"""Tables of text for the screen, as wide as it is. Leaves out what stands in them."""

import io
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

GAP = 2  # cells between two columns
NARROWEST_WORDS, FOLDED_WORDS = 16, 10  # cells that a column of words may be folded to, and where all else is too wide
WIDEST_TEXT = 116  # cells of a line of prose


def screen_width() -> int | None:
    """Return the columns of the terminal that standard output is; None for a pipe or a file, which have no width."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left: Iterable[str] = (),
    optional: Sequence[str] = (),
    width: int | None = None,
) -> str:
    """Return lines of text with the cells in columns, under their headings and a rule.

    left: the headings of columns that hold words; the others are pushed to the right, as numbers are. Short rows are
    filled up, an empty one is a blank line, and a column without any content is left out.
    width: cells that there are, None for the screen's. Where they are too few, the columns named in `optional` go, the
    first one first, which a line under the table says; then words are folded. Numbers stay whole.
    """
    filled = [list(row) + [""] * (len(headings) - len(row)) for row in rows]
    words = frozenset(left)
    used = [index for index in range(len(headings)) if any(row[index] for row in filled)]
    if not used:
        return ""
    width = width or screen_width()
    widths = {index: max(cell_len(headings[index]), *(cell_len(row[index]) for row in filled)) for index in used}
    least = widths | {
        i: min(widths[i], max(NARROWEST_WORDS, 0, *map(len, headings[i].split()))) for i in used if headings[i] in words
    }

    def needed(cells: dict[int, int]) -> int:
        return sum(cells[index] for index in used) + GAP * max(0, len(used) - 1)

    gone = []
    for heading in optional:
        if width is None or needed(least) <= width:
            break
        if any(headings[index] == heading for index in used):
            gone.append(heading)
            used = [index for index in used if headings[index] != heading]
    if width and needed(least) > width:  # and nothing is left that may go
        least |= {i: min(least[i], FOLDED_WORDS) for i in used if headings[i] in words}
    lines = _laid_out(
        [(headings[index], headings[index] in words) for index in used],
        [[row[index] for index in used] for row in filled],
        max(needed(least), min(needed(widths), width or needed(widths))),
    )
    if gone:
        notice = f"hidden at this width: {', '.join(gone)}; widen the terminal or use a pipe to see them"
        lines += ["", wrapped(notice, width)]
    return "\n".join(lines).rstrip()


def _laid_out(columns: list[tuple[str, bool]], rows: list[list[str]], width: int) -> list[str]:
    """Return the lines of a table that fits into `width` cells. columns: heading, and whether it holds words."""
    grid = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False)
    for heading, is_words in columns:
        grid.add_column(heading, justify="left" if is_words else "right", no_wrap=not is_words, overflow="fold")
    for row in [["-"], *rows]:  # the first says where the heading, which may be folded, ends
        grid.add_row(*map(Text, row))
    lines = [line.rstrip() for line in drawn(grid, width).splitlines()]
    rule = [line.strip() for line in lines].index("-")
    return [*lines[:rule], "-" * max(map(cell_len, lines)), *lines[rule + 1 :]]


def drawn(table: Table, width: int) -> str:
    """Return a table of rich's as text without colours, in so many cells."""
    output = io.StringIO()
    # The height, which plays no part, keeps rich from taking another width where FORCE_COLOR or TERM stand.
    Console(file=output, width=width, height=1, color_system=None, force_jupyter=False, markup=False).print(table)
    return output.getvalue()


def wrapped(sentence: str, width: int | None = None) -> str:
    """Return a sentence as lines of a width, the screen's by default, indented from the second on."""
    cells = max(NARROWEST_WORDS, min(WIDEST_TEXT, width or screen_width() or WIDEST_TEXT))
    return textwrap.fill(sentence, cells, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
