"""Traces made by hand, in the format that jax.profiler writes."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jax.profiler import ProfileData


class Event(NamedTuple):
    """One event; start and duration in microseconds."""

    name: str
    start: float
    duration: float = 0.0
    stats: Mapping[str, int | str] = {}


def instruction(name: str, start: float, duration: float, program: str = "jit_step", **stats: int | str) -> Event:
    """An instruction that ran."""
    return Event(name, start, duration, {"hlo_op": name, "hlo_module": program, **stats})


def handed_in(start: float, number: int) -> Event:
    """A task given to XLA's threads."""
    return Event("ThreadpoolListener::Record", start, 0, {"_p": number})


def task(start: float, stop: float, number: int) -> list[Event]:
    """A task that a thread worked on."""
    return [
        Event("ThreadpoolListener::StartRegion", start, 0, {"_c": number}),
        Event("ThreadpoolListener::StopRegion", stop),
    ]


def space(planes: Mapping[str, Mapping[str, Sequence[Event]]]) -> Any:
    """ProfileData of planes, each with its lines, each with its events."""
    return ProfileData.from_serialized_xspace(
        ProfileData.text_proto_to_serialized_xspace("\n".join(_plane(name, lines) for name, lines in planes.items()))
    )


def _plane(name: str, lines: Mapping[str, Sequence[Event]]) -> str:
    events = [event for each in lines.values() for event in each]
    names = {text: number for number, text in enumerate(dict.fromkeys(event.name for event in events), 1)}
    stats = {text: number for number, text in enumerate(dict.fromkeys(s for event in events for s in event.stats), 1)}
    text = [f'planes {{ name: "{name}"']
    for line, each in lines.items():
        text.append(f'lines {{ name: "{line}" timestamp_ns: 0')
        for event in each:
            values = " ".join(
                f"stats {{ metadata_id: {stats[key]} "
                + (f'str_value: "{value}" }}' if isinstance(value, str) else f"int64_value: {value} }}")
                for key, value in event.stats.items()
            )
            times = f"offset_ps: {round(event.start * 1e6)} duration_ps: {round(event.duration * 1e6)}"
            text.append(f"events {{ metadata_id: {names[event.name]} {times} {values} }}")
        text.append("}")
    for kind, table in (("event_metadata", names), ("stat_metadata", stats)):
        text += [f'{kind} {{ key: {number} value {{ id: {number} name: "{key}" }} }}' for key, number in table.items()]
    return "\n".join([*text, "}"])
