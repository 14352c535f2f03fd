"""llm.c's two random streams by hand: mt19937 (initialisation, data order) and xorshift64* (its sampler).

The first one is also PyTorch's CPU generator, so `Mt19937(42).normal_(out)` is `torch.manual_seed(42)` followed by
`out.normal_()`. Leaves out everything that neither the initialisation nor the loader draws.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

MT_WORDS = 624
# Words handled at a time: the temporaries of a chunk stay in the processor's cache. A multiple of 16, the block below.
CHUNK = 1 << 16


def seed_words(seed: int) -> np.ndarray:
    """Return the 624 state words that a 32-bit seed gives: `init_genrand` of Matsumoto and Nishimura (2002), uint32."""
    words: np.ndarray = np.random.RandomState(seed & 0xFFFFFFFF).get_state(legacy=False)["state"]["key"]
    return words  # (624,)


class Mt19937:
    """The Mersenne twister with the distributions that llm.c builds on it (llmc/rand.h).

    NumPy's MT19937 turns the state and tempers the words (the published algorithm, the same 32-bit words in the same
    order), and its oldest generator seeds them; everything made from the words is here. NumPy's normal draws differ.
    """

    def __init__(self, seed: int = 42) -> None:
        """Start the stream of a seed; of `seed` the low 32 bits count. As torch.manual_seed and llm.c's manual_seed."""
        self._bits = np.random.MT19937(0)
        self._set(seed_words(seed), MT_WORDS, None)

    def _set(self, words: np.ndarray, position: int, next_normal: float | None) -> None:
        self._bits.state = {"bit_generator": "MT19937", "state": {"key": words, "pos": position}}
        self._next_normal = next_normal

    def state(self) -> dict[str, Any]:
        """Return the state as JSON-able data, for `restore`.

        key: the 624 words; pos: how many of them are used up (624: the next draw turns the state); next_normal: the
        second value of the last pair of the short normal draws, where it waits, else None. llm.c's mt19937_state holds
        the same: state_ = key, next_ = pos, left_ = 625 - pos.
        """
        inner = self._bits.state["state"]
        return {"key": inner["key"].tolist(), "pos": int(inner["pos"]), "next_normal": self._next_normal}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where `state()` was taken."""
        self._set(np.array(state["key"], np.uint32), state["pos"], state["next_normal"])

    def raw(self, n: int) -> np.ndarray:
        """Return the next n 32-bit words, (n,) uint32: what n calls of llm.c's `randint32` give."""
        return self._bits.random_raw(n).astype(np.uint32)

    def random_float64(self) -> float:
        """Return one draw, uniform in [0, 1), from the low 53 bits of two words, the high one drawn first."""
        high, low = self.raw(2).tolist()
        return (((high << 32) | low) & ((1 << 53) - 1)) / (1 << 53)

    def normal_(self, out: np.ndarray, mean: float = 0.0, std: float = 1.0) -> np.ndarray:
        """Fill `out` (contiguous float32, 1-D) with normal numbers, as PyTorch's `out.normal_(mean, std)` on the CPU,
        with temporaries of a chunk's size only, and return it.

        From 16 values on, uniforms are drawn in the order of the array, then blocks of 16 are transformed; where the
        size is not a multiple of 16, the last 16 are drawn anew. Shorter arrays take pairs of doubles, and the
        generator keeps an odd pair's second value for the next short draw (llm.c drops it there; PyTorch keeps it).
        Source: `normal_fill` and `normal_fill_16` of llmc/rand.h; ATen/native/cpu/DistributionTemplates.h.
        """
        assert out.dtype == np.float32 and out.ndim == 1 and out.flags.c_contiguous
        if out.size < 16:
            for i in range(out.size):
                out[i] = self._short_normal() * std + mean
            return out
        whole = out.size - out.size % 16
        for start in range(0, whole, CHUNK):
            self._fill_blocks(out[start : min(start + CHUNK, whole)], mean, std)
        if whole < out.size:
            self.raw(out.size - whole)  # drawn for the last values, which the redrawing overwrites
            self._fill_blocks(out[-16:], mean, std)
        return out

    def _fill_blocks(self, out: np.ndarray, mean: float, std: float) -> None:
        # Box and Muller (1958): with u1 in (0, 1] and u2 in [0, 1) uniform,
        #   r = sqrt(-2 ln u1), theta = 2 pi u2,   r cos(theta) and r sin(theta) are independent standard normal.
        # Of each block of 16 uniforms the first 8 are 1 - u1 and the last 8 are u2; the cosines stand first.
        # In float32 as in C, but for the product 2 pi u2: C computes it in double before it rounds.
        uniforms = (self.raw(out.size) & 0xFFFFFF).astype(np.float32) * np.float32(2**-24)
        uniforms = uniforms.reshape(-1, 2, 8)
        u1 = np.float32(1) - uniforms[:, 0]  # (blocks, 8)
        theta = (2 * math.pi * uniforms[:, 1].astype(np.float64)).astype(np.float32)  # (blocks, 8)
        radius = np.sqrt(np.float32(-2) * np.log(u1 + np.float32(1e-12)))  # (blocks, 8)
        pairs = out.reshape(-1, 2, 8)
        pairs[:, 0] = radius * np.cos(theta) * np.float32(std) + np.float32(mean)
        pairs[:, 1] = radius * np.sin(theta) * np.float32(std) + np.float32(mean)

    def _short_normal(self) -> float:
        if self._next_normal is not None:
            value, self._next_normal = self._next_normal, None
            return value
        u1 = self.random_float64()
        u2 = self.random_float64()
        radius = math.sqrt(-2 * math.log1p(-u2))
        theta = 2 * math.pi * u1
        self._next_normal = radius * math.sin(theta)
        return radius * math.cos(theta)

    def permute(self, items: np.ndarray) -> None:
        """Shuffle a contiguous 1-D integer array in place: Fisher and Yates from the end, j = word % (i + 1).

        Source: `random_permutation` of llmc/rand.h.
        """
        view = memoryview(items)
        for top in range(items.size - 1, 0, -CHUNK):
            places = np.arange(top, max(top - CHUNK, 0), -1)  # i = top, top - 1, …
            partners = (self.raw(places.size) % (places + 1)).tolist()
            for i, j in zip(places.tolist(), partners, strict=True):
                view[i], view[j] = view[j], view[i]

    def permutation(self, n: int) -> np.ndarray:
        """Return a shuffled 0, 1, …, n-1, (n,) int32: llm.c's `init_identity_permutation` and `random_permutation`."""
        items = np.arange(n, dtype=np.int32)
        self.permute(items)
        return items


def random_u32(state: int) -> tuple[int, int]:
    """Return one draw of xorshift64* from a 64-bit state other than 0: (32-bit value, next state).

    Source: `random_u32` of llm.c's llmc/sampler.h; Marsaglia (2003), Vigna (2016).
    """
    assert 0 < state < 1 << 64
    state ^= state >> 12
    state ^= (state << 25) & 0xFFFFFFFFFFFFFFFF
    state ^= state >> 27
    return ((state * 0x2545F4914F6CDD1D) & 0xFFFFFFFFFFFFFFFF) >> 32, state


def random_f32(state: int) -> tuple[float, int]:
    """Return one draw, uniform in [0, 1), 24 bits, from an xorshift64* state: (value, next state). llm.c's."""
    word, state = random_u32(state)
    return (word >> 8) / (1 << 24), state


def skip_u32(state: int, draws: int) -> int:
    """Return the xorshift64* state after so many draws, any number at once.

    A draw's shifts and exclusive ors are linear in the state's 64 bits, so squaring their matrix doubles the stride.
    """
    columns = [random_u32(1 << bit)[1] for bit in range(64)]  # where a draw takes each bit
    while draws:
        if draws & 1:
            state = _times(columns, state)
        columns = [_times(columns, column) for column in columns]
        draws >>= 1
    return state


def _times(columns: list[int], vector: int) -> int:
    """Return a matrix of bits, by columns, times a vector of bits."""
    result = 0
    for bit, column in enumerate(columns):
        if vector >> bit & 1:
            result ^= column
    return result
