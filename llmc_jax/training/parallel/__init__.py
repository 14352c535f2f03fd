"""Several devices that train one model: each takes its part of the batch, and with ZeRO keeps its part of the state."""
