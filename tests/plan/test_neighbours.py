"""What is near a configuration, sweeps along an option, their picture, and llm.c's reproductions."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc_jax.base.errors import InputError
from llmc_jax.config.train import AUTO_BATCH, TrainConfig
from llmc_jax.machine.cards import CARDS
from llmc_jax.machine.gpus import GPUS, TARGETS
from llmc_jax.plan.answer import Wishes
from llmc_jax.plan.neighbours import (
    REPRODUCTIONS,
    Row,
    draw_sweep,
    fitted,
    neighbours,
    parse_sweep,
    reproductions,
    reproductions_table,
    rows_table,
    swept,
    title_of,
    wishes,
)

ASKED = TrainConfig(
    model="d6", batch_size=8, sequence_length=256, total_batch_size=2**15, devices=4, recompute=0, max_steps=1000
)
PRICED = Wishes(price=10.0)


@pytest.fixture(scope="module")
def rows() -> tuple[Row, ...]:
    return neighbours(ASKED, "h100", PRICED)


# ----- neighbours -----------------------------------------------------------------------------------------------------


def test_the_asked_one_is_first_and_each_other_differs_in_one_thing(rows: tuple[Row, ...]) -> None:
    def same(row: Row) -> tuple[object, ...]:
        return row.gpu, row.devices, row.batch_size, row.recompute, row.zero_stage

    asked = rows[0]
    assert asked.differs == "" and same(asked) == ("h100", 4, 8, 0, 0) and len(set(map(same, rows))) == len(rows)
    places = {"gpu": 0, "devices": 1, "batch_size": 2, "recompute": 3, "zero_stage": 4}
    for row in rows[1:]:
        changed = {name for name, at in places.items() if same(row)[at] != same(asked)[at]}
        assert changed == {row.differs} and str(same(row)[places[row.differs]]) == row.value


def test_all_cards_are_near_and_counts_sizes_and_levels(rows: tuple[Row, ...]) -> None:
    values = {name: [row.value for row in rows if row.differs == name] for name in ("gpu", "devices", "recompute")}
    assert sorted(["h100", *values["gpu"]]) == sorted(TARGETS)
    assert values["devices"] == ["1", "2", "8"] and values["recompute"] == ["1", "2"]
    assert [row.value for row in rows if row.differs == "batch_size"] == ["4", "16"]
    assert [row.value for row in rows if row.differs == "zero_stage"] == ["1", "2"]


def test_several_gpus_in_the_place_of_one_split_the_state() -> None:
    for asked, of_several in ((0, 1), (1, 1), (2, 2)):
        near = list(wishes(replace(ASKED, devices=1, zero_stage=asked), "h100"))
        assert {config.zero_stage for name, _, config, _ in near if name == "devices"} == {of_several}
        assert not [name for name, *_ in near if name == "zero_stage"]


def test_a_price_of_ones_own_is_that_of_the_asked_gpu_alone(rows: tuple[Row, ...]) -> None:
    for row in rows:
        assert row.figures is not None and row.figures.course is not None and row.figures.course.price is not None
        assert (row.figures.course.price.provider == "--price") == (row.gpu == "h100")


def test_a_row_is_what_the_planner_says(rows: tuple[Row, ...]) -> None:
    """More recomputing takes less memory and more time; more GPUs, less time."""
    of = {(row.differs, row.value): row.figures for row in rows if row.figures}
    assert len(of) == len(rows)
    for more, less in ((("", ""), ("recompute", "1")), (("recompute", "1"), ("recompute", "2"))):
        assert of[more].program > of[less].program and of[more].step.typical < of[less].step.typical
    assert of["devices", "1"].step.typical > of["devices", "2"].step.typical > of[("", "")].step.typical
    one, asked = of["devices", "1"].course, of["", ""].course
    assert one and asked and one.length == asked.length and one.usd and asked.usd and one.kwh and asked.kwh


def test_a_card_of_ones_own_is_asked_by_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for table in (TARGETS, GPUS, CARDS):
        monkeypatch.setitem(table, "mine", next(iter(table.values())))  # type: ignore[attr-defined] # taken out again
    (tmp_path / "card.toml").write_text('name = "mine"\nlike = "h100"\nmemory = 500')
    found = neighbours(ASKED, str(tmp_path / "card.toml"), PRICED)
    assert found[0].gpu == "mine" and found[0].figures and found[0].figures.fits is False
    assert found[0].figures.course and found[0].figures.course.price and found[0].figures.course.price.usd == 10
    others = [row.gpu for row in found if row.differs == "gpu"]
    assert "mine" not in others and "h100" in others


def test_what_is_asked_and_cannot_be_is_refused() -> None:
    with pytest.raises(InputError, match="-d 32768"):
        neighbours(replace(ASKED, batch_size=3), "h100", Wishes())
    with pytest.raises(InputError, match="h1000"):
        neighbours(ASKED, "h1000", Wishes())


def test_a_half_that_is_nothing_and_a_double_that_does_not_divide_are_left_out() -> None:
    found = [name for name, *_ in wishes(replace(ASKED, batch_size=1, total_batch_size=3 * 1024), "h100")]
    assert "batch_size" not in found
    blocks = [name for name, *_ in wishes(replace(ASKED, recompute_blocks=1), "h100")]
    assert "recompute" not in blocks


@given(
    batch=st.integers(1, 70), sequence=st.sampled_from([64, 1000]), devices=st.integers(1, 9), rows=st.integers(1, 200)
)
def test_the_batch_is_lowered_to_what_the_update_allows(batch: int, sequence: int, devices: int, rows: int) -> None:
    config = replace(
        ASKED, batch_size=batch, sequence_length=sequence, devices=devices, total_batch_size=rows * sequence * devices
    )
    found = fitted(config).batch_size
    assert rows % found == 0 and found <= batch
    assert all(rows % size for size in range(found + 1, batch + 1))
    assert fitted(config, "batch_size") == config
    assert fitted(replace(config, total_batch_size=-1)).batch_size == batch


# ----- sweeps ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "values"),
    [
        ("devices=1,2,4", "devices", ("1", "2", "4")),
        ("gpu=h100,a100", "gpu", ("h100", "a100")),
        ("b=8, 16,8", "batch_size", ("8", "16")),
        ("--batch-size=8", "batch_size", ("8",)),
        ("z=0,1,2", "zero_stage", ("0", "1", "2")),
        ("dtype=fp32,bf16", "dtype", ("fp32", "bf16")),
    ],
)
def test_a_sweep_names_an_option_as_its_flags_do(text: str, name: str, values: tuple[str, ...]) -> None:
    found, read = parse_sweep(text)
    assert (found, tuple(read)) == (name, values)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected an option"),
        ("devices", "expected an option"),
        ("devices=", "expected an option"),
        ("devices=1,,2", "expected an option"),
        ("nothing=1", "no such option"),
        ("b=8,x", "x"),
        ("b=0", "0"),
        ("dtype=int8", "int8"),
        ("b=" + ",".join(map(str, range(1, 70))), "at most 64"),
    ],
)
def test_a_sweep_that_is_none_is_refused_in_a_line(text: str, said: str) -> None:
    with pytest.raises(InputError) as error:
        parse_sweep(text)
    assert said in str(error.value) and "\n" not in str(error.value)


@settings(max_examples=40)
@given(st.text(alphabet="=,-bgpu devics0123", max_size=20))
def test_any_text_is_a_sweep_or_refused(text: str) -> None:
    try:
        found = parse_sweep(text)
    except InputError:
        return
    assert found[0] and all(found[1])


def test_a_value_that_cannot_be_is_a_row_that_says_why(tmp_path: Path) -> None:
    found = swept(ASKED, "h100", parse_sweep("b=4,3,100000000"), Wishes())
    assert [row.figures is None for row in found] == [False, True, True]
    assert [bool(row.problem) for row in found] == [False, True, True]
    assert all("\n" not in row.problem for row in found)
    named = swept(ASKED, "h100", parse_sweep("gpu=a100,h1000"), Wishes())
    assert [row.problem == "" for row in named] == [True, False]
    shown = rows_table(found, 200)
    assert shown.count("cannot be") == 2 and all(row.problem in " ".join(shown.split()) for row in found)
    with pytest.raises(InputError, match="--picture"):
        draw_sweep(found[1:], tmp_path / "a.png", "none")


def test_auto_is_the_largest_of_each_row() -> None:
    auto = replace(ASKED, batch_size=AUTO_BATCH, total_batch_size=16 * ASKED.sequence_length)
    found = swept(auto, "h100", parse_sweep("devices=1,2,4"), Wishes())
    assert [row.figures and row.figures.batch_size for row in found] == [16, 8, 4]


def test_a_picture_is_called_what_its_bars_share() -> None:
    assert title_of("devices", "d12", "h100") == "d12 on h100"
    assert (title_of("model", "d12", "h100"), title_of("gpu", "d12", None)) == ("h100", "d12")


def test_a_sweep_is_drawn_with_what_does_not_fit_in_another_colour(tmp_path: Path) -> None:
    small = replace(ASKED, model="d24", sequence_length=1024, batch_size=32, total_batch_size=2**17)
    found = swept(small, "rtx4090", parse_sweep("model=d6,d24"), Wishes())
    assert [row.figures and row.figures.fits for row in found] == [True, False]
    draw_sweep(found, tmp_path / "a.svg", "a title")
    drawn = (tmp_path / "a.svg").read_text()
    # A bar each in the panels of speed, memory, hours and money, and one in the legend.
    assert drawn.count("fill: #d55e00") == drawn.count("fill: #0072b2") == 4 + 1


# ----- llm.c's reproductions ------------------------------------------------------------------------------------------


def test_reproductions_stand_beside_what_llmc_says() -> None:
    """Estimates of another program: within a third of what llm.c took, on the same GPUs with the same flags."""
    found = list(reproductions())
    assert [said for said, _ in found] == list(REPRODUCTIONS)
    assert {said.preset for said, _ in found} == {"gpt2-124M", "gpt2-350M", "gpt2-774M", "gpt2-1558M"}
    for said, row in found:
        figures = row.figures
        assert figures is not None and figures.course is not None and figures.fits and row.devices == said.devices
        assert figures.step.typical == pytest.approx(said.step, rel=1 / 3)
        assert figures.course.seconds.typical / 3600 == pytest.approx(said.hours, rel=1 / 3)
        # what llm.c says agrees with itself: its steps of so long are its hours, but for what it does beside them
        assert said.hours == pytest.approx(said.steps * said.step / 3600, rel=0.06)
    assert len(reproductions_table(found, 200).splitlines()) == 2 + len(found) + 2 + len(found)


def test_a_reproduction_that_cannot_be_computed_stands_there_with_its_reason() -> None:
    (published, row), *others = reproductions()
    damaged = row._replace(figures=None, problem="train.bin: is not a token file")
    text = reproductions_table([(published, damaged), *others], 200)
    assert f"{published.preset} on {published.gpu}: train.bin: is not a token file" in text.splitlines()
    assert len(text.splitlines()) == 2 + 2 * (1 + len(others)) + 2 + 1
