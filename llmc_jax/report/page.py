"""A page as one file that asks nothing of any server: page.html, page.js, Bokeh's JavaScript and the content.

Leaves out what the content is (content.py).
"""

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from llmc_jax.base.errors import InputError
from llmc_jax.base.pictures import PALETTE
from llmc_jax.report.content import Content

HERE = Path(__file__).parent
SCRIPTS = {"BOKEH": "bokeh.min.js", "BOKEH_API": "bokeh-api.min.js"}  # of the installed package
MARK = re.compile(r"@([A-Z_]+)@")
# Nothing is fetched, and no script runs but the three that are named by their hashes. Bokeh makes style sheets.
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'; "
    "script-src"
)


def page(content: Content) -> bytes:
    """Return the page that shows a content. Raises InputError where Bokeh is not installed."""
    return page_of(content.to_json())


def page_of(content: Mapping[str, Any]) -> bytes:
    """Return the page that shows a content given as JSON can hold it."""
    template, scripts = template_and_scripts()
    parts = {**scripts, "POLICY": policy(scripts), "CONTENT": embedded({**content, "palette": PALETTE})}
    # once over the template: nothing that is filled in is searched for marks
    return MARK.sub(lambda mark: parts[mark[1]], template).encode()


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
    scripts = {mark: _text(bokeh_folder() / name) for mark, name in SCRIPTS.items()}
    scripts["SCRIPT"] = _text(HERE / "page.js")
    return _text(HERE / "page.html"), scripts


def bokeh_folder() -> Path:
    """Return the folder with Bokeh's JavaScript, without the import of Bokeh, which takes a second."""
    found = find_spec("bokeh")
    if found is None or not found.submodule_search_locations:
        raise InputError("the report's curves need Bokeh, which is not installed; run: pip install bokeh")
    return Path(found.submodule_search_locations[0]) / "server" / "static" / "js"


def _text(path: Path) -> str:
    """Return a text as a browser reads it, which has line feeds alone."""
    try:
        return path.read_text(encoding="utf-8").replace("\r\n", "\n")
    except OSError as error:
        raise InputError(f"{path}: cannot read it: {error.strerror}; install llmc-jax and bokeh again") from error
