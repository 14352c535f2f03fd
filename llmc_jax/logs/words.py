"""The events and the state of a run in words, a line each. Leaves out where they are shown."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from llmc_jax.base.streams import escaped
from llmc_jax.logs.files import finite_number
from llmc_jax.logs.state import UNKNOWN

LONGEST = 500  # characters of such a line
COMMON = ("event", "step", "time")  # what each event has
# A run's state, and the outcome that its `end` has; another outcome stands as it is.
STATES = {UNKNOWN: "silent", "done": "finished", "bad_input": "failed"}
# An event's words, by its kind: its own fields in braces, and what `_parts` makes of them.
WORDS = {
    "start": "started{_place}",
    "resume": "resumed{_place}",
    "compiled": "{_how} in {seconds:.1f} s",
    "train": "loss {loss:.4f}, norm {norm:.2f}{_skipped}",
    "val": "validation loss {loss:.4f}",
    "eval": "HellaSwag: accuracy norm {accuracy_norm:.4f}",
    "sample": "sample of {tokens} tokens",
    "gpu": "GPU clock {clock_mhz} MHz{_held}",
    "checkpoint": "saved {path} in {ms:,.0f} ms",
    "save_failed": "saving a checkpoint failed: {problem}",
    "removed": "checkpoint deleted",
    "data": "{file}: {what}",
    "warnings": "{_warnings}",
    "early_stop": "early stop: {stale} validations without improvement, {_lowest}",
    "find_lr": "learning-rate range test: suggests {_suggestion}",
    "tracker": "{name}: {sent} sent, {dropped} dropped{_problem}",
    "lost": "lost rank {rank}{_place}, in phase {phase}: {_cause}",
    "end": "{_end}",
}
Event = Mapping[str, Any]


def event_words(event: Event) -> str:
    """Return an event in words, without its step and time: one line, with nothing that a terminal would obey.

    Of a kind that is not known here, its fields. Values may be of any type, as in a damaged file.
    """
    kind = event.get("event")
    words = WORDS.get(kind) if isinstance(kind, str) else None
    text = escaped(_all_of(event) if words is None else words.format_map(_Fields(event))) or escaped(str(kind))
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def state_words(state: str) -> str:
    """Return a run's state, or the outcome of its last start, as it is shown."""
    return STATES.get(state, state.replace("_", " "))


class _Value(NamedTuple):
    """A field as words show it: numbers in a form, `?` for none."""

    value: Any

    def __format__(self, form: str) -> str:
        if self.value is None:
            return "?"
        number = finite_number(self.value) if form else None
        return str(self.value) if number is None else format(float(number), form)


class _Fields(dict[str, Any]):
    """The fields of an event, and the parts that are made of them, for words that may name one which it lacks."""

    def __init__(self, event: Event) -> None:
        super().__init__({name: _Value(value) for name, value in event.items()})
        self.update(_parts(event, self))

    def __missing__(self, name: str) -> _Value:
        return _Value(None)


def _parts(event: Event, shown: _Fields) -> dict[str, str]:
    """Return the parts of words that depend on whether an event has a field."""
    has = event.get
    warnings = has("words")
    return {
        "_place": f" on {has('host')}, pid {shown['pid']}" if has("host") else "",
        "_how": "loaded compiled programs from the cache" if has("from_cache") else "compiled",
        "_skipped": ", skipped" if has("skipped") else "",
        "_held": "" if has("cap") in (None, "no") else f", {has('cap')} cap",
        "_warnings": "; ".join(map(str, warnings)) if isinstance(warnings, list) else str(warnings),
        "_lowest": "no finite loss"
        if has("best_loss") is None
        else f"lowest loss {shown['best_loss']:.4f} at step {shown['best_step']}",
        "_suggestion": "none" if has("suggestion") is None else f"{shown['suggestion']:.3g}",
        "_problem": f": {has('problem')}" if has("problem") else "",
        "_cause": ": ".join(str(has(name)) for name in ("cause", "words") if has(name)) or "?",
        "_end": state_words(f"{shown['outcome']}"),
    }


def _all_of(event: Event) -> str:
    kind = str(event.get("event")).replace("_", " ")
    facts = ", ".join(f"{name} {_Value(event[name]):.6g}" for name in event if name not in COMMON)
    return f"{kind}: {facts}" if facts else kind
