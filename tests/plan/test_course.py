"""How many steps a run makes, and what they come to: seconds, validations, money."""

import datetime
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc_jax.base.errors import FormatError, InputError
from llmc_jax.base.numbers import Interval, certain
from llmc_jax.config.flags import parse_args
from llmc_jax.config.train import TrainConfig
from llmc_jax.data.tokenfile import write_token_file
from llmc_jax.machine.gpus import TARGETS
from llmc_jax.plan.course import Data, Price, course, data_of, length_of, price_of, prices

STEP = Interval(0.1, 0.125, 0.2)
BASE = TrainConfig(batch_size=4, sequence_length=64, total_batch_size=1024, val_every=0)  # A = 4
DATA = Data(10_300, "files", "a")


# ----- steps ----------------------------------------------------------------------------------------------------------


def test_steps_are_of_tokens_before_x_before_an_epoch() -> None:
    asked = replace(BASE, max_steps=7)
    found = [length_of(asked, 5_000, DATA), length_of(asked, None, DATA), length_of(BASE, None, DATA)]
    assert [(each.steps, each.tokens, each.source) for each in found if each] == [
        (4, 4096, "--tokens"), (7, 7168, "-x"), (10, 10240, "files"),
    ]  # fmt: skip
    assert [each.epochs for each in found if each] == [4096 / 10300, 7168 / 10300, 10240 / 10300]
    assert length_of(BASE) is None
    unknown = length_of(asked)
    assert unknown is not None and (unknown.steps, unknown.epochs) == (7, None)


def test_more_devices_make_larger_updates_of_fewer_steps() -> None:
    eight = replace(BASE, total_batch_size=-1, devices=8)
    found = length_of(eight, None, DATA)
    assert found is not None and (found.steps, found.tokens) == (5, 5 * 8 * 256)


@pytest.mark.parametrize("tokens", [0, -1, 1023, math.nan, math.inf])
def test_tokens_that_make_no_step_are_refused(tokens: float) -> None:
    with pytest.raises(InputError, match="--tokens"):
        length_of(BASE, tokens)


def test_data_that_makes_no_step_is_refused() -> None:
    with pytest.raises(InputError, match="-d 1024"):
        length_of(BASE, None, Data(1023, "files", "a"))


# ----- data -----------------------------------------------------------------------------------------------------------


def test_the_headers_of_all_files_are_counted(tmp_path: Path) -> None:
    for name, count in (("a_1.bin", 300), ("a_2.bin", 500), ("b.bin", 40)):
        write_token_file(tmp_path / name, np.zeros(count, np.uint16))
    config = replace(BASE, train_data=str(tmp_path / "a_*.bin"), val_data=str(tmp_path / "b.bin"))
    both = [data_of(config), data_of(replace(config, overfit=True))]
    assert [(each.tokens, each.source) for each in both if each] == [(800, "files"), (40, "files")]


def test_a_file_that_is_no_token_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"x" * 1023)
    with pytest.raises(FormatError, match=r"a\.bin"):
        data_of(replace(BASE, train_data=str(tmp_path / "a.bin")))


def test_llmcs_reproductions_have_its_steps_without_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = {}
    for preset in ("gpt2-124M", "gpt2-350M", "gpt2-774M", "gpt2-1558M"):
        config = parse_args(["--preset", preset])
        found[preset] = length_of(config, None, data_of(config))
    assert {name: each and (each.steps, each.source) for name, each in found.items()} == {
        "gpt2-124M": (19_560, "published"), "gpt2-350M": (60_000, "-x"), "gpt2-774M": (286_102, "-x"),
        "gpt2-1558M": (32_000, "-x"),
    }  # fmt: skip
    epochs = [round(each.epochs or 0, 2) for each in found.values() if each]
    assert epochs == [1.0, 0.31, 1.5, 0.34]


def test_of_files_that_nobody_knows_nothing_is_said(tmp_path: Path) -> None:
    assert data_of(replace(BASE, train_data=str(tmp_path / "mine_*.bin"))) is None
    assert course(STEP, BASE, certain(1.0)) is None


# ----- time -----------------------------------------------------------------------------------------------------------


@given(
    steps=st.integers(0, 300), every=st.integers(0, 120), batches=st.integers(1, 30),
    devices=st.sampled_from([1, 4, 8]), order=st.sampled_from(["global", "llmc"]),
)  # fmt: skip
def test_validations_are_those_that_the_loop_makes(
    steps: int, every: int, batches: int, devices: int, order: str
) -> None:
    config = replace(
        BASE, max_steps=steps, val_every=every, val_batches=batches, devices=devices, total_batch_size=2048,
        batch_order=order,
    )  # fmt: skip
    found = course(STEP, config, certain(1.0))
    times = sum(every > 0 and (step % every == 0 or step == steps) for step in range(steps + 1))  # run/due.py's rule
    assert found is not None and found.validations == times
    on_each = batches if order == "llmc" else math.ceil(batches / devices)
    assert found.validating == certain(times * on_each)
    assert found.seconds.low == pytest.approx(steps * STEP.low + found.validating.low)


def test_what_a_validation_over_all_data_takes_is_left_out_and_said() -> None:
    found = course(STEP, replace(BASE, max_steps=9, val_every=3, val_batches=-1), certain(1.0))
    assert found is not None and found.validating == certain(0) and "validations" in found.left_out


# ----- money ----------------------------------------------------------------------------------------------------------


def test_money_is_that_of_all_gpus() -> None:
    config = replace(BASE, max_steps=36_000, devices=2)
    price = Price(2.5, "x", "2026-01-01", "y")
    found = course(STEP, config, certain(1.0), price=price)
    assert found is not None and found.usd is not None
    assert found.gpu_hours == pytest.approx((2.0, 2.5, 4.0))
    assert found.usd == pytest.approx((5.0, 6.25, 10.0)) and found.price is price


def test_every_card_has_a_dated_price_with_a_source() -> None:
    assert set(prices()) == set(TARGETS)
    for price in prices().values():
        assert 0.1 < price.usd < 20 and price.provider and price.source
        assert datetime.date(2026, 1, 1) <= datetime.date.fromisoformat(price.date)


def test_a_price_of_ones_own_counts_more() -> None:
    own = price_of("h100", 1.25)
    assert own is not None and (own.usd, own.date) == (1.25, "")
    listed = price_of("h100")
    assert listed == prices()["h100"] and price_of("mine") is None and price_of(None) is None
    for wrong in (-1.0, math.nan, math.inf):
        with pytest.raises(InputError, match="--price"):
            price_of("h100", wrong)
