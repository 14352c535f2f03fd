"""A page as one file that asks nothing of any server: page.html, page.js, Bokeh's JavaScript and the content.

Leaves out what the content is (content.py), and what of it is HTML (html.py).
"""

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from llmc_jax.base.plain import to_json
from llmc_jax.report.content import Content
from llmc_jax.report.html import Page, look, short_names, signs

HERE = Path(__file__).parent
BOKEH = HERE / "bokeh"  # its README.md says what these files are
SCRIPTS = {"BOKEH": BOKEH / "bokeh.min.js", "BOKEH_API": BOKEH / "bokeh-api.min.js", "SCRIPT": HERE / "page.js"}
MARK = re.compile(r"@([A-Z_]+)@")
# Nothing is fetched, and no script runs but the three that are named by their hashes. Bokeh makes style sheets.
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'; "
    "script-src"
)


def page(content: Content) -> bytes:
    """Return the page that shows a content."""
    template, scripts = template_and_scripts()
    data = embedded(drawn(content))
    parts = {**Page(content).parts(), **scripts, "POLICY": policy(scripts), "CONTENT": data}
    # once over the template: nothing that is filled in is searched for marks
    return MARK.sub(lambda mark: parts[mark[1]], template).encode(errors="xmlcharrefreplace")


def drawn(content: Content) -> dict[str, Any]:
    """Return what page.js draws, as JSON can hold it."""
    runs = [
        {
            "name": name,
            "curves": to_json(run.curves),
            "events": [to_json(event) | sign for event, sign in zip(run.events, signs(run.events), strict=True)],
        }
        for name, run in zip(short_names([run.name for run in content.runs]), content.runs, strict=True)
    ]
    looks = max([len(runs), *(len(panel.curves) for panel in content.panels)])
    known = {run.baseline for run in content.runs if run.baseline is not None}
    return {
        "runs": runs,
        "panels": to_json(content.panels),
        "looks": [look(index) for index in range(looks)],
        "baselines": {f"bigram baseline {value:.4g}": value for value in sorted(known)},
    }


def embedded(value: Any) -> str:
    """Return JSON that can stand in a script element: nothing in it ends the element or begins a comment."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))  # ASCII: U+2028 and lone surrogates are escaped
    return text.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e")


def policy(scripts: Mapping[str, str]) -> str:
    """Return the Content-Security-Policy under which these scripts and no others run."""
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts.values())
    return " ".join([POLICY, *(f"'sha256-{each}'" for each in hashes)])


@cache
def template_and_scripts() -> tuple[str, dict[str, str]]:
    """Return page.html, and what its scripts consist of by their marks."""
    paths = {"": HERE / "page.html", **SCRIPTS}
    texts = {
        mark: path.read_text(encoding="utf-8") for mark, path in paths.items()
    }  # with line feeds, as browsers have
    return texts.pop(""), texts
