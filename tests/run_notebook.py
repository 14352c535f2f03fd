"""Runs a notebook's code in one namespace, as Jupyter would: python tests/run_notebook.py docs/first_steps.ipynb.

Writes what each cell prints and draws into the notebook. So that this needs neither Jupyter nor a process of its own,
cells hold plain Python without magics, and show what they have by `print` and `plt.show()` alone.
"""

import base64
import contextlib
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOTS = 72  # per inch of a picture


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the cells with code."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def execute(sources: list[str], namespace: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """Run the code of one cell after the other and yield its outputs, as they stand in a notebook."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    for count, source in enumerate(sources, start=1):
        outputs: list[dict[str, Any]] = []
        printed = io.StringIO()

        def flush(outputs: list[dict[str, Any]] = outputs, printed: io.StringIO = printed) -> None:
            if printed.getvalue():
                outputs.append({"name": "stdout", "output_type": "stream", "text": lines_of(printed.getvalue())})
                printed.seek(0)
                printed.truncate()

        def show(outputs: list[dict[str, Any]] = outputs, flush: Any = flush) -> None:
            flush()
            picture = io.BytesIO()
            plt.gcf().savefig(picture, format="png", dpi=DOTS, bbox_inches="tight", metadata={"Software": None})
            plt.close("all")
            data = {"image/png": base64.b64encode(picture.getvalue()).decode(), "text/plain": ["<Figure>"]}
            outputs.append({"data": data, "metadata": {}, "output_type": "display_data"})

        original, plt.show = plt.show, show
        try:
            with contextlib.redirect_stdout(printed):
                exec(compile(source, f"cell {count}", "exec"), namespace)
        finally:
            plt.show = original
        flush()
        yield outputs


def lines_of(text: str) -> list[str]:
    """Return text as a notebook has it: its lines, each with its newline."""
    return text.splitlines(keepends=True)


def renew(path: Path) -> None:
    """Run a notebook and put what comes out into it."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    cells = code_cells(notebook)
    found = execute(["".join(cell["source"]) for cell in cells], {})
    for count, (cell, outputs) in enumerate(zip(cells, found, strict=True), start=1):
        cell["outputs"], cell["execution_count"] = outputs, count
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        renew(Path(name))
