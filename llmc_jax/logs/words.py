"""The events of a run in words, a line each. Leaves out where they are shown."""

from collections.abc import Callable, Mapping
from typing import Any

from llmc_jax.streams import escaped

LONGEST = 500  # characters of such a line
COMMON = ("event", "step", "time")  # what each event has
Event = Mapping[str, Any]


def event_words(event: Event) -> str:
    """Return an event in words, without its step and time: one line, with nothing that a terminal would obey.

    Of a kind that is not known here, its fields. Values may be of any type, as in a damaged file.
    """
    kind = event.get("event")
    words = WORDS.get(kind, _fields) if isinstance(kind, str) else _fields
    text = escaped(words(event)) or escaped(str(kind))
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _shown(event: Event, name: str, form: str = "") -> str:
    """Return a field as it is shown: numbers in a form, `?` for none."""
    value = event.get(name)
    if value is None:
        return "?"
    number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    return format(float(value), form) if form and number else str(value)


def _place(event: Event) -> str:
    """Return where a start runs, as far as it is known."""
    return f" on {event['host']}, process {_shown(event, 'pid')}" if event.get("host") else ""


def _start(event: Event) -> str:
    return f"started{_place(event)}"


def _resume(event: Event) -> str:
    return f"resumed{_place(event)}"


def _compiled(event: Event) -> str:
    what = "took compiled programs from the cache" if event.get("from_cache") else "compiled"
    return f"{what} in {_shown(event, 'seconds', '.1f')} s"


def _checkpoint(event: Event) -> str:
    return f"saved {_shown(event, 'path')} in {_shown(event, 'ms', ',.0f')} ms"


def _removed(_: Event) -> str:
    return "its checkpoint was deleted"


def _save_failed(event: Event) -> str:
    return f"a checkpoint could not be saved: {_shown(event, 'problem')}"


def _data(event: Event) -> str:
    return f"{_shown(event, 'file')}: {_shown(event, 'what')}"


def _warnings(event: Event) -> str:
    words = event.get("words")
    return "; ".join(map(str, words)) if isinstance(words, list) else str(words)


def _train(event: Event) -> str:
    skipped = ", skipped" if event.get("skipped") else ""
    return f"loss {_shown(event, 'loss', '.4f')}, norm {_shown(event, 'norm', '.2f')}{skipped}"


def _val(event: Event) -> str:
    return f"validation loss {_shown(event, 'loss', '.4f')}"


def _eval(event: Event) -> str:
    return f"HellaSwag: accuracy norm {_shown(event, 'accuracy_norm', '.4f')}"


def _sample(event: Event) -> str:
    return f"sample of {_shown(event, 'tokens')} tokens"


def _gpu(event: Event) -> str:
    cap = event.get("cap")
    return f"GPU clock {_shown(event, 'clock_mhz')} MHz" + ("" if cap in (None, "no") else f", held back by {cap}")


def _early_stop(event: Event) -> str:
    lowest = f"lowest loss {_shown(event, 'best_loss', '.4f')} at step {_shown(event, 'best_step')}"
    known = "no loss was finite" if event.get("best_loss") is None else lowest
    return f"early stop: {_shown(event, 'stale')} validations without an improvement, {known}"


def _find_lr(event: Event) -> str:
    found = "suggests none" if event.get("suggestion") is None else f"suggests {_shown(event, 'suggestion', '.3g')}"
    return f"learning-rate range test: {found}"


def _tracker(event: Event) -> str:
    problem = f": {event['problem']}" if event.get("problem") else ""
    return f"{_shown(event, 'name')}: {_shown(event, 'sent')} sent, {_shown(event, 'dropped')} dropped{problem}"


def _lost(event: Event) -> str:
    cause = ": ".join(str(event[name]) for name in ("cause", "words") if event.get(name))
    return f"lost rank {_shown(event, 'rank')}{_place(event)}, in phase {_shown(event, 'phase')}: {cause or '?'}"


ENDS = {
    "done": "ended: done",
    "stopped": "ended: stopped",
    "diverged": "ended: diverged",
    "bad_input": "ended with an error",
}


def _end(event: Event) -> str:
    outcome = _shown(event, "outcome")
    return ENDS.get(outcome, f"ended: {outcome}")


def _fields(event: Event) -> str:
    kind = str(event.get("event")).replace("_", " ")
    facts = ", ".join(f"{name} {_shown(event, name, '.6g')}" for name in event if name not in COMMON)
    return f"{kind}: {facts}" if facts else kind


WORDS: dict[str, Callable[[Event], str]] = {
    "start": _start, "resume": _resume, "compiled": _compiled, "train": _train, "val": _val, "eval": _eval,
    "sample": _sample, "gpu": _gpu, "checkpoint": _checkpoint, "save_failed": _save_failed, "removed": _removed,
    "data": _data, "warnings": _warnings, "early_stop": _early_stop, "find_lr": _find_lr, "tracker": _tracker,
    "lost": _lost, "end": _end,
}  # fmt: skip
