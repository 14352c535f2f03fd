"""The two random streams against numbers that llm.c's own C code and PyTorch printed."""

import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc_jax.base.rng import CHUNK, Mt19937, random_f32, random_u32, skip_u32

# Printed by llm.c's llmc/rand.h (f1e2ace, gcc 12, glibc 2.36), seed 137: five words, normal_(8), a word, normal_(16),
# a word. They are also the numbers of that file's comment.
SEED_137_WORDS = [4053805790, 2173880614, 380293709, 1237255315, 2986595568]
SEED_137_NORMAL_8 = [
    0.794766486, 1.43693173, -0.229219183, 0.475563288, -0.633441091, -0.579195499, -0.0925704017, -0.865919709,
]  # fmt: skip
SEED_137_NORMAL_16 = [
    -1.28138781, -2.64639568, -0.0656950399, 0.21808295, -0.465362161, -0.331084102, 2.54854822, 0.104253836,
    0.846065938, 0.946244836, -0.291376501, 0.343138069, -1.11867034, -0.1830533, -2.31531596, 0.396198779,
]  # fmt: skip

# PyTorch 2.13 (CPU): torch.manual_seed(7), then one after the other torch.empty(n).normal_(mean, std)
TORCH_SEED_7 = [
    (3, 0.0, 1.0, [-0.146795094, 0.786141276, 0.94682163]),
    (17, 0.0, 1.0, [
        -0.176437929, -1.21692944, -0.0810215846, 1.36148512, -1.3032167, 0.0874783769, -1.38496137, 0.503563881,
        -0.0835282281, -0.564006686, -2.05646253, -0.356722534, 1.09558046, 0.482354164, 1.39891839, 1.40585291,
        -1.40125084,
    ]),
    (2, 1.0, 2.0, [-1.228688, 3.16837502]),
    (32, 0.0, 0.02, [
        -0.0250957031, 0.0163291302, -0.0213079788, -0.00356385228, -0.00518997712, -0.000289758813, -0.00767781958,
        -0.0593233965, 0.00474029174, 0.0126536414, -0.0018335433, 0.032486327, 3.13454148e-05, -0.00875081401,
        -0.0421706662, 0.0229001492, 0.00598283717, -0.0284088887, -0.00326909753, 0.00266479608, 0.00365090813,
        -0.0102926465, 0.0160103757, -0.0248637926, -0.0247393716, -0.00125134795, 0.00899018813, -0.017715944,
        0.0239403676, 0.00934924092, -0.0028787991, -0.0162400901,
    ]),
    (1, 0.0, 1.0, [0.1580562]),
]  # fmt: skip


def test_words_and_normals_are_llmc_s() -> None:
    rng = Mt19937(137)
    assert rng.raw(5).tolist() == SEED_137_WORDS
    np.testing.assert_allclose(rng.normal_(np.empty(8, np.float32)), SEED_137_NORMAL_8, rtol=0, atol=1e-6)
    assert rng.raw(1) == 2186503452
    np.testing.assert_allclose(rng.normal_(np.empty(16, np.float32)), SEED_137_NORMAL_16, rtol=0, atol=1e-6)
    assert rng.raw(1) == 2756748748


def test_normals_are_pytorch_s() -> None:
    """Among them an odd short draw, whose second value waits for the next short one, and a tail drawn anew."""
    rng = Mt19937(7)
    for n, mean, std, expected in TORCH_SEED_7:
        np.testing.assert_allclose(rng.normal_(np.empty(n, np.float32), mean, std), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("seed", [0, 1, 137, 5489, 2**32 - 1])
def test_words_are_those_of_the_standard_library_s_twister(seed: int) -> None:
    """CPython's MT19937 with the state set from the published recurrence, written out here once more."""
    words = [seed]
    for j in range(1, 624):
        words.append((1812433253 * (words[j - 1] ^ words[j - 1] >> 30) + j) % 2**32)
    oracle = random.Random()
    oracle.setstate((3, (*words, 624), None))
    rng = Mt19937(seed)
    expected = [oracle.getrandbits(32) for _ in range(1500)]
    assert [int(rng.raw(1)[0]) for _ in range(700)] + rng.raw(800).tolist() == expected


@pytest.mark.parametrize("n", [16, 31, 32, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 17])
def test_large_draws_follow_box_and_muller_in_blocks_of_16(n: int) -> None:
    """Against the same formula, value by value in float64, from the words alone: chunks must leave no seam."""
    count = n + 16 if n % 16 else n
    words = Mt19937(11).raw(count)
    uniforms = (words & 0xFFFFFF) / 2.0**24
    expected = np.empty(n)

    def transform(at: int, block: np.ndarray) -> None:
        radius = np.sqrt(-2 * np.log(1 - block[:8] + 1e-12))
        expected[at : at + 8] = 0.5 + 3 * radius * np.cos(2 * np.pi * block[8:])
        expected[at + 8 : at + 16] = 0.5 + 3 * radius * np.sin(2 * np.pi * block[8:])

    for at in range(0, n - 15, 16):
        transform(at, uniforms[at : at + 16])
    if n % 16:
        transform(n - 16, uniforms[n:])
    rng = Mt19937(11)
    # float32 throughout, radius up to 5.8: a few units in the last place of 3 * 5.8
    np.testing.assert_allclose(rng.normal_(np.empty(n, np.float32), 0.5, 3.0), expected, rtol=0, atol=1e-5)
    following = Mt19937(11)
    following.raw(count)
    assert rng.raw(1) == following.raw(1)


def test_permutations_are_llmc_s() -> None:
    # from llm.c's loader and llmc/rand.h, as above
    assert Mt19937(42).permutation(10).tolist() == [1, 3, 9, 7, 6, 0, 8, 4, 5, 2]


@pytest.mark.parametrize("n", [0, 1, 2, CHUNK, CHUNK + 1, CHUNK + 2])
def test_permuting_is_fisher_yates_from_the_end(n: int) -> None:
    words = iter(Mt19937(5).raw(max(n - 1, 0)).tolist())
    expected = [3 * k for k in range(n)]
    for i in range(n - 1, 0, -1):
        j = next(words) % (i + 1)
        expected[i], expected[j] = expected[j], expected[i]
    items = np.arange(0, 3 * n, 3, dtype=np.int32)
    rng = Mt19937(5)
    rng.permute(items)
    assert items.tolist() == expected
    following = Mt19937(5)
    following.raw(max(n - 1, 0))
    assert rng.raw(1) == following.raw(1)


@given(before=st.integers(0, 1300), short=st.integers(0, 5))
@settings(max_examples=30, deadline=None)
def test_a_restored_state_continues_the_stream(before: int, short: int) -> None:
    rng = Mt19937(9)
    rng.raw(before)
    rng.normal_(np.empty(short, np.float32))
    saved = json.loads(json.dumps(rng.state()))
    expected = [rng.normal_(np.empty(3, np.float32)).tolist(), rng.raw(700).tolist()]
    other = Mt19937(1)
    other.restore(saved)
    assert [other.normal_(np.empty(3, np.float32)).tolist(), other.raw(700).tolist()] == expected


def test_the_sampler_s_stream() -> None:
    """The first values from llm.c's starting state 1337."""
    state, words, floats = 1337, [], []
    for _ in range(6):
        value, _ = random_f32(state)
        word, state = random_u32(state)
        words.append(word)
        floats.append(value)
    assert words == [989205090, 818269915, 1335155955, 3876892996, 2941700015, 1322121497]
    np.testing.assert_allclose(
        floats, [0.23031723, 0.19051826, 0.31086516, 0.90265948, 0.68491787, 0.30783039], rtol=0, atol=1e-8
    )
    assert state < 1 << 64


@pytest.mark.parametrize("draws", [0, 1, 2, 17, 1000])
def test_skipping_is_drawing(draws: int) -> None:
    state = 13371337
    for _ in range(draws):
        state = random_u32(state)[1]
    assert skip_u32(13371337, draws) == state


def test_skipping_far_adds_up_and_comes_round() -> None:
    """The period of xorshift64* is 2^64 - 1 (Marsaglia 2003)."""
    assert skip_u32(skip_u32(1337, 10**12), 7 * 10**15) == skip_u32(1337, 10**12 + 7 * 10**15) != 1337
    assert skip_u32(1337, 2**64 - 1) == 1337
    assert skip_u32(0, 5) == 0  # where it can never leave
