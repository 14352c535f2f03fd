"""The events and the state of a run in words, a line each. Leaves out where they are shown."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

from llmc_jax.base.streams import escaped
from llmc_jax.logs.files import finite_number
from llmc_jax.logs.state import UNKNOWN

LONGEST = 500  # characters of such a line
COMMON = ("event", "step", "time")  # what each event has
# A run's state, and the outcome that its `end` has; another outcome stands as it is.
STATES = {UNKNOWN: "silent", "done": "finished", "bad_input": "failed"}
# An event's words, by its kind, with its own fields in braces; of another kind its fields by name.
WORDS = {
    "start": "started on {host}, pid {pid}",
    "resume": "resumed on {host}, pid {pid}",
    "train": "loss {loss:.4f}, norm {norm:.2f}",
    "val": "validation loss {loss:.4f}",
    "sample": "sample of {tokens} tokens",
    "checkpoint": "saved {path} in {ms:,.0f} ms",
    "save_failed": "saving a checkpoint failed: {problem}",
    "removed": "checkpoint deleted",
    "data": "{file}: {what}",
    "lost": "lost rank {rank} on {host}, pid {pid}, in phase {phase}: {cause} {words}",
    "end": "{outcome}",
}
Event = Mapping[str, Any]


def event_words(event: Event) -> str:
    """Return an event in words, without its step and time: one line, with nothing that a terminal would obey.

    Values may be of any type, as in a damaged file.
    """
    kind = event.get("event")
    words = WORDS.get(kind) if isinstance(kind, str) else None
    if kind == "end":
        event = {**event, "outcome": state_words(str(event.get("outcome", "ended")))}
    fields = defaultdict(lambda: _Value(None), {name: _Value(value) for name, value in event.items()})
    text = escaped(_all_of(event) if words is None else words.format_map(fields)) or escaped(str(kind))
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


def _all_of(event: Event) -> str:
    kind = str(event.get("event")).replace("_", " ")
    facts = ", ".join(f"{name} {_Value(event[name]):.6g}" for name in event if name not in COMMON)
    return f"{kind}: {facts}" if facts else kind
