"""The notebook runs, its outputs are those of its code, and nothing in it tells of the machine that made them."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.run_notebook import code_cells, execute

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/first_steps.ipynb"


@pytest.fixture(scope="module")
def notebook() -> dict[str, Any]:
    return json.loads(PAGE.read_text(encoding="utf-8"))


def kinds(outputs: list[dict[str, Any]]) -> list[str]:
    """What was printed, drawn or shown, in order."""
    return [each["output_type"] for each in outputs]


@pytest.mark.slow
def test_every_cell_runs_and_gives_what_is_shown(notebook: dict[str, Any]) -> None:
    cells, found = code_cells(notebook), dict[str, Any]()
    for outputs, cell in zip(execute(["".join(cell["source"]) for cell in cells], found), cells, strict=True):
        assert kinds(outputs) == kinds(cell["outputs"])
    assert found["losses"][0] == pytest.approx(np.log(257), abs=0.1) and found["losses"][-1] < 0.5
    held_back = found["losses_held_back"]
    assert min(held_back) < 3.5 and held_back[-1] > min(held_back) + 0.5  # overfitting
    assert all(found["new"][name] > 2 * found["known"][name] for name in ("wte", "qkvw", "fcw"))
    words = "Beautiful is better than ugly."
    likeliest = found["llmc_jax"].complete(found["trained"], words[:12], tokens=len(words) - 12, temperature=0)
    assert words[:12] + likeliest.text == words


def test_outputs_are_in_order_and_tell_nothing_of_a_machine(notebook: dict[str, Any]) -> None:
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    cells = code_cells(notebook)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    pictures = [each for cell in cells for each in cell["outputs"] if "image/png" in each.get("data", {})]
    assert len(pictures) == 2 and sum(bool(cell["outputs"]) for cell in cells) >= 8
    text = "".join("".join(each.get("text", "")) for cell in cells for each in cell["outputs"])
    assert not re.search(r"/(home|root|tmp|usr|work|Users)\b|\bseconds\b|\bms\b|Warning|0x[0-9a-f]{6}", text)


def test_links_lead_somewhere(notebook: dict[str, Any]) -> None:
    words = "".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown")
    links = re.findall(r"\]\(([^)#\s]+)", words)
    assert links and all((PAGE.parent / link).exists() for link in links)
