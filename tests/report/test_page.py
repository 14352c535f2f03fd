"""The page of a report: one file in which no text becomes anything else, and in a browser the content's numbers."""

import base64
import hashlib
import json
import math
import re
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llmc_jax.report.content import Content, Event, Figure, Run, Sample, Status, X, panels_of
from llmc_jax.report.gather import content_of, read_runs
from llmc_jax.report.html import short_names
from llmc_jax.report.page import BOKEH, embedded, page
from tests import chromium
from tests.report.runs import BEGAN, end, run_folder, start, train, usual

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = (
    "</script><script>window.hit = 1</script><!-- <img src=x onerror=window.hit=2> $$\\int$$ \u2028\x00\ud800 &lt;"
)
EMPTY = Content("nothing yet", 0.0, "0", [], [], None)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


class Elements(HTMLParser):
    """The elements of a page with their attributes, and what its scripts consist of."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.inside = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self.inside = tag == "script"
        if self.inside:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = False

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.scripts[-1] += data


def test_a_page_without_data_takes_no_more_than_2_mb() -> None:
    assert len(page(EMPTY)) <= 2_000_000


@given(value=JSON)
@example(value=HOSTILE)
@example(value={HOSTILE: [HOSTILE, 1e308, -0.0]})
def test_content_comes_back_out_of_the_page_as_it_was(value: Any) -> None:
    text = embedded(value)
    assert not set(text) & set("<>&\u2028\u2029")
    assert json.loads(text) == value


@pytest.fixture(scope="module")
def hostile_page() -> Elements:
    return Elements(page(Content(HOSTILE + "@BOKEH@ @CONTENT@ @@", 0.0, "0", [], [], None)).decode())


def test_a_hostile_text_adds_no_element(hostile_page: Elements) -> None:
    plain = Elements(page(EMPTY).decode())
    assert [tag for tag, _ in hostile_page.found] == [tag for tag, _ in plain.found]
    assert len(hostile_page.scripts) == 4


def test_only_the_page_s_own_scripts_run_and_nothing_is_fetched(hostile_page: Elements) -> None:
    policies = [a["content"] for tag, a in hostile_page.found if tag == "meta" and a.get("http-equiv")]
    rules = {name: values for name, *values in map(str.split, (policies[0] or "").split(";"))}
    hashes = {
        f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in hostile_page.scripts[1:]
    }
    assert len(policies) == 1 and rules["default-src"] == ["'none'"]
    assert len(hashes) == 3 and set(rules["script-src"]) == hashes
    addresses = [a.get(name) or "" for _, a in hostile_page.found for name in ("src", "href") if name in a]
    assert all(address.startswith("data:") for address in addresses)


def test_bokeh_s_files_are_those_of_its_release_and_the_wheel_has_them() -> None:
    digests = dict(re.findall(r"`(\S+)` \| `([0-9a-f]{64})`", (BOKEH / "README.md").read_text()))
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in BOKEH.glob("*.js")}
    assert found == digests and len(found) == 2
    assert "Bokeh Contributors" in (BOKEH / "LICENSE.txt").read_text()
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["llmc_jax"]
    assert {f"report/{name}" for name in ("page.html", "page.js", "bokeh/*")} <= set(data)


def test_names_drop_a_long_beginning_where_a_word_begins() -> None:
    assert short_names(["demo-2026-11-28-cosine", "demo-2026-11-28-constant"]) == ["…cosine", "…constant"]
    assert short_names(["run-1", "run-12"]) == ["run-1", "run-12"]
    assert short_names(["alone-with-a-long-name"]) == ["alone-with-a-long-name"]


# ----- in a browser ---------------------------------------------------------------------------------------------------

STEPS = 120
TOKENS = 2048


def losses(shift: float) -> list[float]:
    return [5.3 * math.exp(-step / 40) + 1 + shift + 0.1 * math.sin(12.9898 * step) for step in range(STEPS)]


def curve(steps: list[int], y: list[float], timed: bool = True) -> Figure:
    x = np.array(steps)
    places = X(x, x * TOKENS if timed else None, x * 0.25 if timed else None)
    return Figure(places, np.array(y), None)


def run(name: str, shift: float, curves: dict[str, Figure] | None = None) -> Run:
    train, every = losses(shift), list(range(0, STEPS, 20))
    usual = {
        "train.loss": curve(list(range(STEPS)), train),
        "val.loss": curve(every, [train[step] + 0.05 for step in every]),
        "norm": curve(list(range(STEPS)), [1 / (1 + step) for step in range(STEPS)]),
    }
    status = Status("done", STEPS, STEPS, "all steps")
    samples = [Sample(step, 4, f"{HOSTILE} {step}") for step in (0, 60)]
    events = [Event("resume", 60, 60.0 * TOKENS, 15.0, HOSTILE)]
    facts = [("Options", [("seed", "42")])]
    return Run(name, f"runs/{name}", "run folder", status, [("loss", "1.2")], facts, {},
               usual if curves is None else curves, samples, events, [HOSTILE], baseline=2.4)  # fmt: skip


def made_by_hand(*runs: Run) -> bytes:
    found = panels_of({"train.loss", "val.loss", "norm"}, len(runs) > 1)
    panels = [panel._replace(log=panel.key == "loss") for panel in found]
    return page(Content(HOSTILE, 1.0, "0", list(runs), panels, None))


# Every renderer of the drawn figures by its name, which says run, curve and part; JSON has no NaN.
FIGURES = """(() => {
    const found = {}, number = value => Number.isFinite(value) ? value : String(value);
    const column = (each, name) => Array.from(each.data_source.get_column(name) ?? [], number);
    for (const figure of Bokeh.documents.flatMap(document => document.roots())) {
        const {x_range: x, y_range: y} = figure;
        found[figure.name] = {log: figure.y_scale.type === "LogScale", x: [x.start, x.end], y: [y.start, y.end]};
        for (const each of figure.renderers.filter(each => each.name))
            found[figure.name + each.name] = {
                shown: each.visible, x: column(each, each.glyph.x.field), y: column(each, "y"),
            };
    }
    return found;
})()"""
READY = "document.documentElement && document.documentElement.dataset.ready === 'yes'"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Tab]:
    if (binary := chromium.find()) is None:
        pytest.skip("no Chromium or Chrome on this machine ($CHROMIUM names one); the content itself is tested without")
    with chromium.browser(binary, tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


class Shown:
    """A page in the browser."""

    def __init__(self, tab: chromium.Tab, path: Path, page: bytes) -> None:
        path.write_bytes(page)
        self.tab = tab
        tab.fresh(path.as_uri())
        tab.until(READY)

    def figures(self) -> dict[str, Any]:
        return self.tab.run(FIGURES)

    def do(self, script: str) -> dict[str, Any]:
        self.tab.run(f"{{ {script} }}")
        self.tab.run("new Promise(done => requestAnimationFrame(() => setTimeout(done)))")
        return self.figures()

    def check_quiet(self) -> None:
        """It has complained of nothing, and asked for nothing but itself."""
        assert self.tab.complaints == []
        asked = {url for url in self.tab.requests if not url.startswith("data:")}
        assert asked == {self.tab.run("document.URL.split('#')[0]")}


def part(run: int, key: str, name: str, panel: str = "loss") -> str:
    return panel + json.dumps([run, key, name], separators=(",", ":"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with a loss that is not finite, a step logged again after a resume, and a torn last line."""
    rows = usual()
    rows[31] = train(int(rows[31]["step"]), loss="inf", norm="nan", skipped=True)
    again = [
        {**start(step=30), "event": "resume"},
        *(train(step, loss=4.0 - step / 80) for step in range(30, 50)),
        end(50),
    ]
    return run_folder(tmp_path_factory.mktemp("runs") / "demo", [*rows, *again], torn='{"event": "tra')


def logged(folder: Path, event: str, field: str) -> dict[int, Any]:
    """What the metrics file says, read with nothing of ours: of a step that stands there twice the last."""
    lines = (folder / "metrics.jsonl").read_text().split("\n")[:-1]
    return {row["step"]: row[field] for row in map(json.loads, lines) if row["event"] == event and field in row}


@pytest.mark.slow
def test_the_figures_hold_the_numbers_of_the_metrics_file_by_each_axis(
    tab: chromium.Tab, folder: Path, tmp_path: Path
) -> None:
    shown = Shown(tab, tmp_path / "report.html", page(content_of(read_runs([folder]))))
    drawn: dict[str, Any] = {}
    for axis in ("step", "tokens", "time"):
        figures = shown.do(f"document.querySelector('input[name=x][value={axis}]').click()")
        drawn[axis] = figures
        (low, high), y = figures["loss"]["x"], figures["loss"]["y"]
        points = figures[part(0, "train.loss", "raw")]
        assert low <= points["x"][0] and points["x"][-1] <= high and figures["norm"]["x"] == [low, high]
        assert y[0] < min(loss for loss in points["y"] if loss != "NaN") < y[1]
    for panel, key, event, field in [
        ("loss", "train.loss", "train", "loss"), ("norm", "norm", "train", "norm"), ("lr", "lr", "train", "lr"),
        ("tokens_per_second", "tokens_per_second", "train", "tokens_per_second"), ("ms", "ms", "train", "ms"),
    ]:  # fmt: skip
        wanted, raw = logged(folder, event, field), part(0, key, "raw", panel)
        assert drawn["step"][raw]["x"] == list(wanted)
        assert drawn["step"][raw]["y"] == [y if isinstance(y, float) else "NaN" for y in wanted.values()]
        assert drawn["tokens"][raw]["x"] == list(logged(folder, "train", "tokens").values())
        times = logged(folder, "train", "time").values()
        assert drawn["time"][raw]["x"] == pytest.approx([time - BEGAN for time in times])
    losses = logged(folder, "val", "loss")
    validation = drawn["step"][part(0, "val.loss", "points")]
    assert (validation["x"], validation["y"]) == (list(losses), list(losses.values()))
    infinite = [step for step, loss in logged(folder, "train", "loss").items() if not isinstance(loss, float)]
    assert infinite and drawn["step"][part(0, "train.loss", "bad")]["x"] == infinite
    shown.check_quiet()


def test_controls_do_what_they_say(tab: chromium.Tab, tmp_path: Path) -> None:
    shown = Shown(tab, tmp_path / "two.html", made_by_hand(run("one", 0.0), run("two", 0.5)))
    before = shown.figures()
    log = shown.do("document.querySelector('[name=log]').click()")
    assert before["loss"]["log"] != log["loss"]["log"] and not before["norm"]["log"] and not log["norm"]["log"]
    slider = "document.getElementById('smooth')"
    set_to = f"{slider}.value = '{{}}'; {slider}.dispatchEvent(new Event('input', {{{{bubbles: true}}}}))"
    shown.do(set_to.format(0))
    assert shown.figures()[part(0, "train.loss", "smooth")]["y"] == losses(0.0)
    shown.do(set_to.format(20))
    means = shown.figures()[part(0, "train.loss", "smooth")]["y"]
    window = 0.2 * (STEPS - 1) / 2
    for step in (0, 1, 50, STEPS - 1):
        half = min(window, step)
        near = [loss for at, loss in enumerate(losses(0.0)) if abs(at - step) <= half]
        assert means[step] == pytest.approx(sum(near) / len(near), rel=1e-9)
    hidden = shown.do("document.querySelector('[name=run1]').click()")
    assert hidden[part(0, "train.loss", "smooth")]["shown"] and not hidden[part(1, "train.loss", "smooth")]["shown"]
    assert "run1=0" in tab.run("location.hash")
    off = shown.do("document.querySelector('[name=\"loss train.loss\"]').click()")
    assert not off[part(0, "train.loss", "smooth")]["shown"] and off[part(0, "val.loss", "points")]["shown"]
    shown.check_quiet()


def test_the_readings_at_a_step_are_its_values(tab: chromium.Tab, tmp_path: Path) -> None:
    shown = Shown(tab, tmp_path / "read.html", made_by_hand(run("low", 0.0), run("high", 0.5)))
    tab.run("document.querySelector('.plot').focus(); charts[0].cursor = 60")
    tab.press("ArrowRight", 39)  # two of 120 points further: a hundredth of them, rounded up
    rows = "document.querySelector('.bk-Tooltip').shadowRoot.querySelectorAll('tr')"
    first, *rows = tab.run(f"[...{rows}].map(row => row.innerText.trim().split(/\\s+/))")
    assert first[-2:] == ["training", "validation"]
    for row, name, shift in zip(rows, ("high", "low"), (0.5, 0.0), strict=True):  # from high to low
        numbers = [float(word) for word in row if word[:1].isdigit()]
        assert name in row and numbers[0] == pytest.approx(losses(shift)[62], rel=1e-4)
        assert numbers[-2:] == [pytest.approx(losses(shift)[60] + 0.05, rel=1e-4), 60]  # the validation, and its step
    shown.check_quiet()


@pytest.mark.slow
def test_a_zoom_is_shared_by_all_charts_and_kept_by_its_address(tab: chromium.Tab, tmp_path: Path) -> None:
    shown = Shown(tab, tmp_path / "zoom.html", made_by_hand(run("one", 0.0)))
    whole = shown.figures()
    zoomed = shown.do("document.querySelector('[data-zoom=\"0.5\"]').click()")
    start, end = zoomed["loss"]["x"]
    assert end - start == pytest.approx((whole["loss"]["x"][1] - whole["loss"]["x"][0]) / 2)
    assert zoomed["norm"]["x"] == [start, end]
    assert zoomed["loss"]["y"][1] < whole["loss"]["y"][1]  # it fits what is seen
    tab.fresh(tab.run("location.href"))
    tab.until(READY)
    assert shown.figures()["norm"]["x"] == pytest.approx([start, end])
    assert shown.do("document.getElementById('unzoom').click()")["loss"] == whole["loss"]
    tab.run("HTMLAnchorElement.prototype.dispatchEvent = function () { window.saved = this; }")
    tab.run("document.querySelector('[data-act=save]').click()")
    assert tab.until("window.saved && saved.download") == "loss.png"
    shown.check_quiet()


def test_hostile_texts_stay_texts(tab: chromium.Tab, tmp_path: Path) -> None:
    shown = Shown(tab, tmp_path / "hostile.html", made_by_hand(run(f"a{HOSTILE}", 0.0), run(f"b{HOSTILE}", 0.5)))
    tab.run("document.querySelector('.plot').focus()")
    tab.press("ArrowRight", 39)
    assert HOSTILE[:20] in tab.run("document.querySelector('.bk-Tooltip').shadowRoot.textContent")
    assert tab.run("document.querySelector('#samples pre').textContent.startsWith('</script><script>window.hit = 1')")
    assert tab.run("window.hit === undefined && document.querySelectorAll('script').length === 4")
    assert tab.run("document.querySelectorAll('img').length") == 0
    shown.check_quiet()


@pytest.mark.slow
def test_runs_without_points_with_one_and_with_no_finite_one(tab: chromium.Tab, tmp_path: Path) -> None:
    nan = math.nan
    bad = curve([0, 1, 2, 3, 4], [3.0, nan, math.inf, 2.0, 0.0])
    runs = [
        run("none", 0.0, {})._replace(samples=[], events=[], facts=[], summary=[]),
        run("one", 0.0, {"train.loss": curve([0], [2.0])}),
        run("bad", 0.0, {"train.loss": bad, "norm": curve([0], [nan], timed=False)}),
    ]
    shown = Shown(tab, tmp_path / "bad.html", made_by_hand(*runs))
    figures = shown.figures()
    assert figures[part(2, "train.loss", "bad")]["x"] == [1, 2]
    assert figures[part(2, "train.loss", "raw")]["y"] == [3.0, "NaN", "NaN", 2.0, 0.0]
    assert figures[part(1, "train.loss", "points")]["x"] == [0]
    shown.do("document.querySelector('[name=log]').click()")  # none has a place for 0
    shown.do("document.querySelector('[name=log]').click()")
    for axis in ("tokens", "time"):
        shown.do(f"document.querySelector('input[name=x][value={axis}]').click()")
    assert "x=time" in tab.run("location.hash")
    shown.check_quiet()
    Shown(tab, tmp_path / "empty.html", page(EMPTY)).check_quiet()
