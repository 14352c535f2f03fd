"""What a page has besides its curves, as HTML: overview, cards of the charts, samples, events, differences, facts.

Texts of runs are untrusted: `tag` escapes all that is not its own. Leaves out the page round it (page.py).
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from html import escape
from typing import Any

import numpy as np

from llmc_jax.base.numbers import duration
from llmc_jax.logs.curves import loss_range
from llmc_jax.logs.state import state_words
from llmc_jax.report.content import Content, Event, Panel, Run, Sample, Status

SIGNS = {"running": "●", "done": "✓", "stopped": "■", "unknown": "?"}  # of states; of all others ✗
COLORS = 7  # of page.html: --color-0 and so on
DASHES = ((), (9, 4), (2, 3), (9, 3, 2, 3), (16, 4))
MARKS = {  # of Bokeh, and what they look like in a legend
    "circle": "M4 0a4 4 0 1 1-8 0a4 4 0 1 1 8 0", "square": "M-3.5-3.5h7v7h-7z", "triangle": "M0-4.5L4.2 3.2H-4.2z",
    "diamond": "M0-5L3.6 0L0 5L-3.6 0z", "inverted_triangle": "M0 4.5L4.2-3.2H-4.2z",
    "star": "M0-5L1.3-1.7L4.8-1.5L2.1.7L3 4.1L0 2.2L-3 4.1L-2.1.7L-4.8-1.5L-1.3-1.7z",
    "hex": "M0-4.5L3.9-2.2V2.2L0 4.5L-3.9 2.2V-2.2z",
}  # fmt: skip
LONG = 8  # characters: names drop no shorter beginning
PICTURES = {c: 0x2400 + c for c in (*range(9), *range(11, 32))} | {127: 0x2421}  # of control characters


# Kinds of events: the mark on the chart's lower edge, its colour in page.html.
KINDS = {
    "skipped": ("x", "--bad"), "save_failed": ("x", "--bad"), "start": ("triangle", "--accent"),
    "resume": ("triangle", "--accent"), "early_stop": ("square", "--warn"), "end": ("square", "--soft"),
    "warnings": ("diamond", "--warn"), "data": ("diamond", "--soft"),
}  # fmt: skip
BENDS = ("save_failed", "resume", "early_stop")  # that explain a bend in a curve: a line from top to bottom
FEW = 12  # such lines of one kind
EDGE = 0.025  # of the height, where events stand


class Html(str):
    """Text that is HTML already."""


def text(value: object) -> str:
    """Return a value as HTML. Control characters show as their pictures: a sample holds whatever a model wrote."""
    return value if isinstance(value, Html) else escape(str(value).translate(PICTURES))


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """Return an element. Of attributes class_ is class, data_run data-run; True has no value, None is left out."""
    shown = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{text(value)}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    inner = "".join(text(child) for child in children if child is not None)
    return Html(f"<{name}{shown}>" + ("" if name == "input" else f"{inner}</{name}>"))


def joined(parts: Iterable[str]) -> Html:
    """Return elements as one."""
    return Html("".join(parts))


def section(name: str, title: str, *children: object) -> Html:
    """Return a part of the page under its title."""
    return tag("section", tag("h2", title, id=f"{name}-title"), *children, id=name, aria_labelledby=f"{name}-title")


def scrolling(label: str, *children: object, class_: str = "scroll") -> Html:
    """Return what may be wider or higher than its card, from the keyboard too."""
    return tag("div", *children, class_=class_, tabindex=0, role="region", aria_label=label)


def table(head: Sequence[object], rows: Iterable[str]) -> Html:
    """Return a table whose rows are made; without a head where that is empty."""
    titles = tag("thead", tag("tr", *(tag("th", each, scope="col") for each in head))) if head else None
    return tag("table", titles, tag("tbody", *rows))


def look(index: int) -> dict[str, Any]:
    """Return how a curve is drawn: of one run each curve has a look of its own, of several each run has."""
    marks = list(MARKS)
    return {"color": index % COLORS, "dash": DASHES[index % len(DASHES)], "mark": marks[index % len(marks)]}


def signs(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Return how a run's events look on a chart: mark, colour, and up to where a line goes."""
    kinds = [event.kind for event in events]
    looks = [KINDS.get(kind, ("circle", "--soft")) for kind in kinds]
    return [
        {"mark": mark, "color": color, "top": 1 if kind in BENDS and kinds.count(kind) <= FEW else EDGE}
        for kind, (mark, color) in zip(kinds, looks, strict=True)
    ]


def swatch(index: int, line: bool = True, mark: bool = True) -> Html:
    """Return a look as a small picture."""
    own = look(index)
    color, dash = f"var(--color-{own['color']})", " ".join(map(str, own["dash"]))
    drawn = tag("path", d="M1 6H33", stroke=color, stroke_width=2.2, stroke_dasharray=dash, fill="none")
    shape = tag("path", d=MARKS[own["mark"]], fill=color, transform="translate(17 6)")
    parts = (drawn if line else None), (shape if mark else None)
    return tag("svg", *parts, class_="swatch", viewBox="0 0 34 12", aria_hidden="true")


def short_names(names: Sequence[str]) -> list[str]:
    """Return names without a long beginning that all have, cut where a word begins, so that their ends are seen."""
    first, last = min(names, default=""), max(names, default="")  # what these two share, all do
    common = next((first[:end] for end in range(len(first), 0, -1) if last.startswith(first[:end])), "")
    common = re.sub(r"[^-_./ ]*$", "", common) if len(names) > 1 else ""
    return [f"…{name[len(common) :]}" for name in names] if len(common) >= LONG else list(names)


class Page:
    """The parts of one page."""

    def __init__(self, content: Content) -> None:
        self.content, self.runs, self.several = content, content.runs, len(content.runs) > 1
        self.names = short_names([run.name for run in content.runs])

    def named(self, index: int) -> Html:
        """Return a run's look and name."""
        run = self.runs[index]
        name = tag("span", self.names[index], class_="cut", title=f"{run.name}\n{run.path}")
        return tag("span", swatch(index), name, class_="row named")

    def parts(self) -> dict[str, str]:
        """Return all parts by the marks of page.html."""
        content = self.content
        made = datetime.fromtimestamp(content.made).astimezone().isoformat(" ", "seconds")
        return {
            "TITLE": text(content.title),
            "MADE": text(f"Written {made} by llmc-jax {content.version}"),
            "LOG": tag("input", type="checkbox", name="log", checked=looks_log(content)),
            "RUNS": self.list_of_runs(),
            "OVERVIEW": self.overview_of_several() if self.several else joined(map(overview, self.runs)),
            "REMARKS": joined(self.remarks()),
            "PANELS": joined(self.panel(place, each) for place, each in enumerate(content.panels))
            or tag("p", "No values have been logged yet.", class_="soft"),
            "SAMPLES": self.samples(),
            "EVENTS": self.events(),
            "DIFFERENCES": self.differences(),
            "FACTS": self.facts(),
        }

    # ----- the controls

    def list_of_runs(self) -> Html:
        """Return the list in which runs are shown or hidden."""
        if not self.several:
            return Html()
        rows = [
            tag("label", tag("input", type="checkbox", name=f"run{index}", checked=True), self.named(index),
                class_="check", data_look=index)
            for index in range(len(self.runs))
        ]  # fmt: skip
        both = [tag("button", words, type="button", data_shows=words.lower()) for words in ("All", "None")]
        return tag("fieldset", tag("legend", "Runs"), tag("div", *rows, id="list"), tag("div", *both, class_="row"))

    def remarks(self) -> Iterator[Html]:
        """Yield what must be known of the runs to read the charts, some of it by one axis alone."""
        said: list[tuple[str, str | None, list[Run]]] = [
            (f"Not drawn, {axis} unknown", axis, [run for run in self.runs if run.curves and lacks(run, axis)])
            for axis in ("tokens", "time")
        ]
        thinned = [*filter(is_thinned, self.runs)]
        said.append(("Thinned to the first, last, lowest and highest point of each stretch", None, thinned))
        for words, only, runs in said:
            if runs:
                yield tag("p", f"{words}: {', '.join(run.name for run in runs)}.", class_="soft", data_axis=only)

    # ----- the overview

    def overview_of_several(self) -> Html:
        """Return the headline figures of all runs as a table."""
        names = list(dict.fromkeys(name for run in self.runs for name, _ in run.summary))
        rows = []
        for index, run in enumerate(self.runs):
            cells = [tag("td", dict(run.summary).get(name, ""), class_="num") for name in names]
            state = tag("td", chip(run.status), title=run.status.words)
            rows.append(tag("tr", tag("th", self.named(index), scope="row"), state, *cells, data_run=index))
        notes = [tag("div", tag("b", run.name), notes_of(run)) for run in self.runs if run.notes]
        return tag("div", scrolling("Runs", table(["Run", "State", *names], rows), class_="scroll wide"), *notes,
                   class_="card")  # fmt: skip

    # ----- the charts

    def panel(self, place: int, panel: Panel) -> Html:
        """Return the card of a chart, into which page.js draws it."""
        unit = tag("span", f" {panel.unit}", class_="unit") if panel.unit else None
        label = f"Save as a picture: {panel.title}"
        save = tag("button", "PNG", type="button", title="Save as a picture", aria_label=label, data_act="save")
        box = tag("input", type="checkbox", class_="away", aria_label=f"Full width: {panel.title}")
        tools = tag("span", save, tag("label", box, "⤢", title="Full width") if place else None, class_="tools")
        head = tag("div", tag("h3", panel.title, unit), tag("span", class_="at"), tools, class_="head")
        plot = tag("div", class_="plot", tabindex=0, role="img", aria_label=panel.title)
        shape = "card panel" if place else "card panel wide-panel"
        return tag("article", head, self.legend(panel), plot, class_=shape, data_key=panel.key)

    def legend(self, panel: Panel) -> Html | None:
        """Return the switches of a chart's curves, where it has several."""
        if len(panel.curves) < 2:
            return None

        def sign(index: int, line: bool) -> Html:  # of several runs, colours say which run
            return tag("span", "▬" if line else "●") if self.several else swatch(index, line, not line)

        switches = [
            tag(
                "label", field(f"{panel.key} {each.key}"), sign(index, each.mark == "line"), each.label, data_look=index
            )
            for index, each in enumerate(panel.curves)
        ]
        return tag("div", *switches, class_="switches", role="group", aria_label=f"Curves of {panel.title}")

    # ----- samples, events, differences, facts

    def samples(self) -> Html:
        """Return the samples of all runs, the last ones first, those of a step beside each other."""
        found = [(sample.step, index, sample) for index, run in enumerate(self.runs) for sample in run.samples]
        found.sort(key=lambda each: (-each[0], each[1]))
        cards = tag("div", *(self.sample(index, each) for _, index, each in found), class_="texts")
        return section("samples", "Samples", scrolling("Samples", cards, class_="tall")) if found else Html()

    def sample(self, index: int, sample: Sample) -> Html:
        tokens = "" if sample.tokens is None else f" · {sample.tokens:,} tokens"
        words = tag("span", f"step {sample.step:,}{tokens}")
        head = tag("div", self.named(index) if self.several else None, words, class_="row soft")
        written = tag("pre", Html("\n"), sample.text, dir="auto")
        return tag("article", head, written, class_="card", data_run=index)

    def events(self) -> Html:
        """Return what happened as a table, with switches of its kinds."""
        found = [(index, event) for index, run in enumerate(self.runs) for event in run.events]
        found.sort(key=lambda each: each[1].step)
        if not found:
            return Html()
        kinds = [event.kind for _, event in found]
        filters = [
            tag("label", field(f"kind {kind}"), f"{kind.replace('_', ' ')} {kinds.count(kind):,}")
            for kind in dict.fromkeys(kinds)
        ]
        buttons = tag("div", *filters, class_="switches filters", role="group", aria_label="Kinds of events")
        columns = [*(["Run"] if self.several else []), "Step", "Time", "Kind", "Details"]
        rows = (self.event(*each) for each in found)
        shown = tag("div", scrolling("Events", table(columns, rows)), class_="card")
        return section("events", "Events", buttons if len(filters) > 1 else None, shown)

    def event(self, index: int, event: Event) -> Html:
        run = tag("td", self.named(index)) if self.several else None
        time = "" if event.time is None or not np.isfinite(event.time) else duration(event.time)
        cells = [tag("td", f"{event.step:,}", class_="num"), tag("td", time, class_="num")]
        words = tag("td", event.kind.replace("_", " ")), tag("td", event.words)
        return tag("tr", run, *cells, *words, data_run=index, data_kind=event.kind)

    def differences(self) -> Html:
        """Return the settings in which runs differ as a table."""
        found = self.content.differences
        if found is None:
            return Html()
        rows = [
            tag("tr", tag("th", row.name, tag("span", f" {row.group}", class_="soft"), scope="row"),
                *(tag("td", value, class_="mono", title=value) for value in row.values))
            for row in found
        ]  # fmt: skip
        shown = table(["Setting", *map(self.named, range(len(self.runs)))], rows)
        same = tag("p", "The runs have the same configuration.", class_="soft")
        inner = scrolling("Differences", shown, class_="scroll wide") if rows else same
        return section("differences", "Differences", tag("div", inner, class_="card"))

    def facts(self) -> Html:
        """Return the settings of each run, folded up."""
        cards = [self.facts_of(run) for run in self.runs if run.facts]
        return section("facts", "Configuration and machine", *cards) if cards else Html()

    def facts_of(self, run: Run) -> Html:
        groups = [
            tag("div", tag("h3", group), table((), (
                tag("tr", tag("th", name, scope="row"), tag("td", value, class_="mono")) for name, value in rows
            )))
            for group, rows in run.facts
        ]  # fmt: skip
        title = run.name if self.several else ", ".join(dict.fromkeys(name.split(":")[0] for name, _ in run.facts))
        return tag("details", tag("summary", title), tag("div", *groups, class_="groups"), class_="card")


# ----- small parts ----------------------------------------------------------------------------------------------------


def field(name: str) -> Html:
    """Return a switch of the form that is on at first, unseen beside what it switches."""
    return tag("input", type="checkbox", name=name, form="controls", checked=True, class_="away")


def lacks(run: Run, axis: str) -> bool:
    """Return whether a run does not say where its points lie by an axis."""
    return all(getattr(each.x, axis) is None for each in run.curves.values())


def is_thinned(run: Run) -> bool:
    """Return whether not all points of a run are drawn."""
    return any(each.mean is not None for each in run.curves.values())


def chip(status: Status) -> Html:
    """Return how a run ended, in its colour."""
    return tag("span", f"{SIGNS.get(status.state, '✗')} {state_words(status.state)}", class_=f"chip {status.state}")


def notes_of(run: Run) -> Html | None:
    """Return what could not be read of a run."""
    return tag("ul", *(tag("li", note) for note in run.notes), class_="notes") if run.notes else None


def overview(run: Run) -> Html:
    """Return the headline figures of one run as tiles."""
    status = run.status
    where = tag("span", f"{run.path} · {run.kind}", class_="soft grow")
    row = tag("div", chip(status), tag("span", status.words), where, class_="row")
    bar = None
    if status.steps:
        step = min(max(status.step or 0, 0), status.steps)
        bar = tag("progress", max=status.steps, value=step, aria_label=f"{step} of {status.steps} steps")
    tiles = [tag("div", tag("dt", name), tag("dd", figure(value)), class_="tile") for name, value in run.summary]
    return joined([tag("div", row, bar, notes_of(run), class_="card"), tag("dl", *tiles, class_="tiles")])


def figure(value: str) -> Html:
    """Return a figure: its number is large and what follows it small, except in times, which have several."""
    found = re.fullmatch(r"(\S*\d)(,?\s.*)", value, re.DOTALL)
    if found is None or re.match(r"\d+ (s|min|h|d)\b", value):
        return Html(text(value))
    return joined([text(found[1]), tag("small", found[2])])


def looks_log(content: Content) -> bool:
    """Return whether the loss halves or more: then its axis is logarithmic, as in the run's own picture."""
    keys = next(([curve.key for curve in panel.curves] for panel in content.panels if panel.log), [])
    shown = loss_range([], [run.curves[key].y for run in content.runs for key in keys if key in run.curves])
    return shown is not None and shown.log
