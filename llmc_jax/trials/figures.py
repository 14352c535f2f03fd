"""What a measurement gives."""

Figures = dict[str, float | int | str]
SAME, OTHER, FREE = "the same", "OTHER", "not promised"  # the figure `bits` of numerics


class NotMeasured(Exception):
    """This cannot be measured here; the message says why. No error."""
