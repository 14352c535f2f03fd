"""The table that a run was trained with, asked for after its source is gone, its folder moved and all caches empty."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import llmc_jax
from llmc_jax.checkpoint import convert, store
from llmc_jax.data import tables
from llmc_jax.data.command import main as data_main
from llmc_jax.data.tokenizers import END_OF_TEXT, Table, Tokenizer, file_tokenizer, table_tokenizer
from llmc_jax.evaluate import command as evaluate
from llmc_jax.generate import command as generate
from llmc_jax.generate import page
from llmc_jax.generate.llmc import SEED, sample_mult, sample_softmax
from llmc_jax.generate.llmc import generate as llmc_generate
from llmc_jax.run.command import main as train_main
from tests.own_table import PADDED, TEXT, V, made_tokenizer, write_own

pytestmark = pytest.mark.usefixtures("nothing_lasts", "quick_compilation")

Say = Callable[..., str]


class Trained(NamedTuple):
    """A run on an own table, moved; neither the table's file nor the data lies where it was."""

    run: Path
    data: Path
    tokenizer: Tokenizer
    vocab_size: int

    @property
    def ids(self) -> list[int]:
        """Those of TEXT."""
        return self.tokenizer.encode(TEXT).tolist()


def shape(vocab_size: int) -> str:
    return f"L1-NH1-C8-V{vocab_size}-T32"


def flags(data: Path, out: Path, *more: Any) -> list[str]:
    files = ("-i", data / "mine_train_*.bin", "-j", data / "mine_val_*.bin")
    words = (*files, "-b", 1, "-t", 32, "-x", 2, "-v", 0, "-s", 2, "-g", 8, "-o", out, *more)
    return [str(word) for word in words]


# V=50257, for which the vocabulary alone would suggest GPT-2's table; and V=512 for a table of 326 pieces.
of_both = pytest.mark.parametrize("trained", [V, PADDED], indirect=True)
of_padded = pytest.mark.parametrize("trained", [PADDED], indirect=True)


def prepare_and_train(folder: Path, table: Path, *more: Any) -> None:
    (folder / "text.txt").write_text(TEXT * 40)
    words = ["--tokenizer", str(table), "--out", str(folder / "d"), "--name", "mine"]
    assert data_main(["prepare", str(folder / "text.txt"), *words]) == 0
    assert train_main(flags(folder / "d", folder / "run", *more)) == 0


@pytest.fixture(scope="module", params=[V])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """V=50257, unless the test says otherwise."""
    asked, folder = request.param, tmp_path_factory.mktemp("own")
    size = V if asked == V else 326
    table = write_own(folder / "own.bin", size)
    prepare_and_train(folder, table, "-e", shape(asked))
    table.unlink()
    (folder / "run").rename(folder / "moved")
    (folder / "d").rename(folder / "elsewhere")
    return Trained(folder / "moved", folder / "elsewhere", made_tokenizer(size), asked)


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Say:
    """Run a command in a folder with another table of GPT-2's size and name; return what it prints."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.chdir(tmp_path)
    tables.write(tmp_path / "gpt2_tokenizer.bin", other_table(made_tokenizer()))

    def run(main: Callable[[list[str]], int], *words: Any, status: int = 0) -> str:
        capsys.readouterr()
        assert main([str(word) for word in words]) == status
        out, err = capsys.readouterr()
        return err if status else out

    return run


def other_table(tokenizer: Tokenizer) -> Tokenizer:
    """A table of the same size, whose pieces are in another order."""
    pieces = tokenizer.pieces[::-1][1:]
    return table_tokenizer("other", Table((*pieces, END_OF_TEXT), len(pieces)), "other")


def ids_of(path: Path | str, **options: Any) -> list[int]:
    return llmc_jax.encode(llmc_jax.load(path, **options), TEXT).tolist()


@pytest.mark.slow
@of_both
def test_every_command_reads_by_the_table_of_the_training(trained: Trained, say: Say) -> None:
    ids = trained.ids
    assert ids_of(trained.run) == ids
    found = json.loads(say(generate.main, trained.run, "--prompt", TEXT[:20], "-n", "9", "--json"))
    assert found["prompt"]["ids"] == trained.tokenizer.encode(TEXT[:20]).tolist()
    assert max(found["samples"][0]["ids"]) < trained.tokenizer.vocab_size
    assert found["model"]["end_of_text"] == trained.tokenizer.eot
    asked = page.request_of(llmc_jax.load(trained.run), {"prompt": TEXT})
    assert list(asked.prompt) == ids
    Path("text.txt").write_text(TEXT)
    of_text = json.loads(say(evaluate.main, trained.run, "--text", "text.txt", "--json"))
    assert of_text["subjects"][0]["results"][0]["tokens"] == len(ids)


def test_the_run_and_its_states_name_the_table(trained: Trained, tmp_path: Path) -> None:
    named = tables.named(trained.tokenizer)
    assert json.loads((trained.run / "config.json").read_text())["tokenizer"]["sha256"] == named.sha256
    metadata = store.open_checkpoint(trained.run / "state_00000002").metadata
    assert metadata.tokenizer == named._replace(name="mine.tokenizer")
    for path in (trained.run / "tokenizer.bin", trained.data / "mine.tokenizer"):
        assert file_tokenizer(path).pieces == trained.tokenizer.pieces
    (tmp_path / "latest").symlink_to(trained.run / "state_00000002")
    assert ids_of(tmp_path / "latest") == trained.ids


@pytest.mark.slow
def test_every_export_carries_it_that_can(trained: Trained, say: Say) -> None:
    ids, run = trained.ids, trained.run
    say(convert.main, "convert", run, "hf", "--to", "hf")
    assert ids_of(Path("hf")) == ids
    assert json.loads(Path("hf/config.json").read_text())["eos_token_id"] == trained.tokenizer.eot
    say(convert.main, "convert", "hf", "again", "--to", "hf")
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        assert Path("again", name).read_bytes() == Path("hf", name).read_bytes()
    say(convert.main, "convert", run, "m.bin")
    assert {path.name for path in Path().glob("*.bin")} == {"m.bin", "gpt2_tokenizer.bin"}
    say(convert.main, "convert", "m.bin", "named", "--to", "hf", "--tokenizer", run / "tokenizer.bin")
    assert ids_of(Path("named")) == ids
    say(convert.main, "convert", run, "llmc", "--to", "llmc-state")
    assert not list(Path("llmc").glob("*tokenizer*"))


@pytest.mark.slow
def test_training_goes_on_with_it_from_a_folder_a_state_and_after_a_break(trained: Trained, say: Say) -> None:
    ids = trained.ids
    say(convert.main, "convert", trained.run, "hf", "--to", "hf")
    shutil.copytree(trained.data, "plain", ignore=shutil.ignore_patterns("*.tokenizer"))
    for name, start in {"of-folder": ("-e", "hf"), "of-run": ("-e", trained.run)}.items():
        say(train_main, *flags(Path("plain"), Path(name), *start))
        assert ids_of(Path(name)) == ids
    shutil.copytree(trained.run, "resumed")
    Path("resumed/tokenizer.bin").unlink()  # the data has it too
    say(train_main, *flags(trained.data, Path("resumed"), "-y", 1, "-x", 3, "-e", shape(trained.vocab_size)))
    assert ids_of(Path("resumed")) == ids
    assert store.open_checkpoint(Path("resumed/state_00000003")).metadata.tokenizer is not None


@pytest.mark.slow
@of_both
def test_a_table_that_is_gone_is_not_replaced(trained: Trained, say: Say) -> None:
    """Nor one that another was put in the place of. The name of a file overrides it, as long as it fits."""
    shutil.copytree(trained.run, "run")
    (table,) = tables.of_run(Path("run"))
    for other in (None, made_tokenizer(300)):
        table.unlink(missing_ok=True)
        if other is not None:
            tables.write(table, other)
        told = say(generate.main, "run", "--prompt", "the", "-n", "1", status=2)
        assert "tokenizer.bin" in told and str(trained.tokenizer.vocab_size) in told
        out = say(convert.main, "convert", "run", f"hf{other is None}", "--to", "hf")
        assert "note    no tokenizer is written" in out
        assert not Path(f"hf{other is None}", "vocab.json").exists()
    write_own(Path("mine.bin"), trained.tokenizer.vocab_size)
    assert ids_of("run", tokenizer="mine.bin") == trained.ids
    write_own(Path("larger.bin"), trained.vocab_size + 1)
    told = say(generate.main, "run", "--prompt", "the", "--tokenizer", "larger.bin", status=2)
    assert f"{trained.vocab_size + 1} ids" in told and f"V={trained.vocab_size}" in told


@pytest.mark.slow
def test_data_and_model_of_two_tables_are_refused(trained: Trained, say: Say) -> None:
    say(convert.main, "convert", trained.run, "hf", "--to", "hf")
    shutil.copytree(trained.data, "data")
    tables.write(Path("data/mine.tokenizer"), other_table(trained.tokenizer))
    told = say(train_main, *flags(Path("data"), Path("two"), "-e", "hf"), status=2)
    assert "mine.tokenizer" in told and "--tokenizer" in told and not Path("two").exists()
    write_own(Path("named.bin"), trained.tokenizer.vocab_size)
    say(train_main, *flags(Path("data"), Path("named"), "-e", "hf", "--tokenizer", "named.bin"))
    assert ids_of(Path("named")) == trained.ids
    Path("data/mine.tokenizer").write_bytes(b"damaged")
    told = say(train_main, *flags(Path("data"), Path("damaged"), "-e", "hf"), status=2)
    assert "mine.tokenizer" in told and not Path("damaged").exists()
    say(train_main, *flags(Path("data"), Path("without"), "-e", shape(trained.vocab_size), "--tokenizer", "none"))
    assert store.open_checkpoint(Path("without/state_00000002")).metadata.tokenizer is None


@pytest.mark.slow
def test_a_folder_whose_tokenizer_cannot_be_read(trained: Trained, say: Say) -> None:
    """Training does without, and says so; no later export has another table in its place."""
    say(convert.main, "convert", trained.run, "hf", "--to", "hf")
    vocab = json.loads(Path("hf/vocab.json").read_text())
    Path("hf/vocab.json").write_text(
        json.dumps({f"{text}x" * (token > 300) or text: token for text, token in vocab.items()})
    )
    told = say(generate.main, "hf", "--prompt", "the", "-n", "1", status=2)
    assert "hf/vocab.json" in told
    shutil.copytree(trained.data, "plain", ignore=shutil.ignore_patterns("*.tokenizer"))
    assert "hf/vocab.json" in say(train_main, *flags(Path("plain"), Path("run"), "-e", "hf"))
    named = store.open_checkpoint(Path("run/state_00000002")).metadata.tokenizer
    assert named == tables.Named("hf", trained.vocab_size, "")
    assert tables.of_run(Path("run")) == []
    say(convert.main, "convert", "run", "out", "--to", "hf")
    assert not Path("out/vocab.json").exists()


@pytest.mark.slow
@of_padded
def test_padding_is_never_drawn(trained: Trained, say: Say) -> None:
    """By any way to draw: the rows beyond a table of 300 pieces have by far the largest logits here."""
    ids = 300
    model = llmc_jax.load(trained.run, tokenizer=str(write_own(Path("short.bin"), ids)))
    wte = np.array(model.weights.wte)
    wte[ids : trained.vocab_size] = 50 * np.sign(np.asarray(model.weights.lnfb) + 1e-3)
    weights = model.weights._replace(wte=wte, lnfb=np.full_like(np.asarray(model.weights.lnfb), 5.0))
    model = model._replace(weights=weights)
    for how in ({"temperature": 0.0}, {}, {"top_k": 5}, {"top_p": 0.9}):
        drawn = list(llmc_jax.stream(model, "the", tokens=12, samples=2, **how))
        assert max(each.token for each in drawn) < ids
        assert max(each.logprob for each in drawn) < -10  # of all V rows
    args = model.weights, model.config, 8, model.end_of_text, (), SEED
    for pick in (sample_softmax, sample_mult):
        assert max(llmc_generate(*args, pick, model.drawable)) < ids
        assert max(llmc_generate(*args, pick)) >= ids


@pytest.mark.slow
def test_questions_in_text_are_read_by_it_too(trained: Trained, say: Say) -> None:
    """By `evaluate`, and by a run with -h 1."""
    endings = ["cat. ", "dog.", "the mat", "then"]
    line = {"ind": 1, "ctx": "the cat sat on", "label": 2, "endings": endings, "activity_label": "x", "ctx_a": "x",
            "ctx_b": "x", "split": "val", "split_type": "x", "source_id": "x"}  # fmt: skip
    Path("questions.jsonl").write_text(json.dumps(line) + "\n")
    found = json.loads(say(evaluate.main, trained.run, "--tasks", "hellaswag=questions.jsonl", "--json"))
    assert found["subjects"][0]["results"][0]["items"] == 1
    start = ("-e", shape(trained.vocab_size), "-h", 1, "--hellaswag-file", "questions.jsonl", "-v", 1)
    say(train_main, *flags(trained.data, Path("asked"), *start))
    assert "eval:" in Path("asked/main.log").read_text()


@pytest.mark.slow
def test_a_resume_with_another_table_leaves_the_states_before_their_own(trained: Trained, say: Say) -> None:
    shutil.copytree(trained.run, "run")
    other = other_table(trained.tokenizer)
    tables.write(Path("other.bin"), other)
    start = ("-e", shape(trained.vocab_size), "-y", 1, "-x", 4, "-n", 1, "--tokenizer", "other.bin")
    say(train_main, *flags(trained.data, Path("run"), *start))
    for step, tokenizer in ((2, trained.tokenizer), (3, other)):
        assert ids_of("run", step=step) == tokenizer.encode(TEXT).tolist()
    Path("run/tokenizer.bin").write_bytes(b"damaged")
    write_own(Path("named.bin"), trained.tokenizer.vocab_size)
    start = ("-e", shape(trained.vocab_size), "-y", 1, "-x", 5, "--tokenizer", "named.bin")
    say(train_main, *flags(trained.data, Path("run"), *start))  # named anew, so nothing else is asked
    assert ids_of(Path("run")) == trained.ids


def test_a_lost_table_is_not_replaced_by_one_that_is_known_to_differ(trained: Trained, say: Say) -> None:
    shutil.copytree(trained.run, "run")
    shutil.copytree(trained.data, "data")
    Path("run/tokenizer.bin").unlink()
    start = ("-e", shape(trained.vocab_size), "-y", 1, "-x", 3)
    tables.write(Path("data/mine.tokenizer"), other_table(trained.tokenizer))
    told = say(train_main, *flags(Path("data"), Path("run"), *start), status=2)
    assert "mine.tokenizer" in told and "--tokenizer" in told
    Path("data/mine.tokenizer").unlink()
    assert "warning: samples are printed as token ids" in say(train_main, *flags(Path("data"), Path("run"), *start))
    named = store.open_checkpoint(Path("run/state_00000003")).metadata.tokenizer
    assert named == tables.named(trained.tokenizer)._replace(name="mine.tokenizer")


@of_padded
def test_what_ends_a_text_is_of_the_table_and_no_padding(trained: Trained, say: Say) -> None:
    """Also where the folder that the weights come from names the last row."""
    say(convert.main, "convert", trained.run, "hf", "--to", "hf", "--tokenizer", "none")
    config = json.loads(Path("hf/config.json").read_text())
    config |= {"eos_token_id": trained.vocab_size - 1, "bos_token_id": None}
    Path("hf/config.json").write_text(json.dumps(config))
    say(train_main, *flags(trained.data, Path("run"), "-e", "hf"))
    assert llmc_jax.load("run").end_of_text == trained.tokenizer.eot
    say(convert.main, "convert", "run", "out", "--to", "hf")
    assert json.loads(Path("out/config.json").read_text())["eos_token_id"] == trained.tokenizer.eot
    short = write_own(Path("short.bin"), 300)
    say(convert.main, "convert", "out", "named", "--to", "hf", "--tokenizer", short)
    assert json.loads(Path("named/config.json").read_text())["eos_token_id"] == 299
    assert llmc_jax.load("named").end_of_text == 299


def test_a_copied_folder_is_read_as_it_was(trained: Trained, say: Say) -> None:
    """With the class that config.json names, which the tokenizer's other files mean nothing without."""
    say(convert.main, "convert", trained.run, "hf", "--to", "hf")
    Path("hf/chat_template.jinja").write_text("{{ x }}")
    config = json.loads(Path("hf/config.json").read_text())
    Path("hf/config.json").write_text(json.dumps(config | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    settings = json.loads(Path("hf/tokenizer_config.json").read_text())
    del settings["tokenizer_class"]
    Path("hf/tokenizer_config.json").write_text(json.dumps(settings))
    out = say(convert.main, "convert", "hf", "again", "--to", "hf")
    assert "not read here" in out  # that class needs a tokenizer.json
    assert json.loads(Path("again/config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert Path("again/chat_template.jinja").read_text() == "{{ x }}"
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json", "chat_template.jinja"):
        Path("hf", name).unlink()
    Path("hf/config.json").write_text(json.dumps(config | {"eos_token_id": None, "bos_token_id": None}))
    out = say(convert.main, "convert", "hf", "without", "--to", "hf")
    assert "note    no tokenizer is written: IN has none" in out
    assert json.loads(Path("without/config.json").read_text())["eos_token_id"] is None  # not what V suggests


def exported(folder: Path) -> Path:
    """Train on an own table at a rate of 0, which leaves the weights as they were drawn, and export the run."""
    prepare_and_train(folder, write_own(folder / "own.bin"), "-e", shape(V), "-l", 0)
    assert convert.main(["convert", str(folder / "run"), str(folder / "hf"), "--to", "hf"]) == 0
    return folder / "hf"


@pytest.mark.slow
def test_transformers_reads_a_run_as_it_was_trained(tmp_path: Path) -> None:
    """Its ids and logits of these very files, tests/golden/own_run.json."""
    golden = json.loads((Path(__file__).parents[1] / "golden" / "own_run.json").read_text())
    folder = exported(tmp_path)
    digests = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in golden["sha256"]}
    assert digests == golden["sha256"]
    for path in (tmp_path / "run", folder):
        model = llmc_jax.load(path)
        assert [llmc_jax.encode(model, text).tolist() for text in golden["texts"]] == golden["ids"]
        assert model.end_of_text == golden["end_of_text"]
        found = np.asarray(llmc_jax.logits(model, golden["ids"][0]))[-1, golden["columns"]]
        np.testing.assert_allclose(found, golden["logits"], rtol=0, atol=1e-5)
        assert np.abs(found).max() > 0.05


@pytest.mark.slow
def test_a_table_that_was_named_stays_the_runs(trained: Trained, say: Say) -> None:
    """Beside data of another: after a move the file is not asked for again. With none it is kept out of the run."""
    shutil.copytree(trained.data, "data")
    tables.write(Path("data/mine.tokenizer"), other_table(trained.tokenizer))
    write_own(Path("named.bin"), trained.tokenizer.vocab_size)
    start = ("-e", shape(trained.vocab_size), "--tokenizer")
    say(train_main, *flags(Path("data"), Path("run"), *start, "named.bin"))
    Path("named.bin").unlink()
    say(train_main, *flags(Path("data"), Path("run"), *start, "named.bin", "-y", 1, "-x", 3))
    assert ids_of(Path("run")) == trained.ids
    told = say(evaluate.main, "run", "--data", "data/mine_val_*.bin", status=2)
    assert "mine.tokenizer" in told and "run/tokenizer.bin" in told
    say(evaluate.main, "run", "--data", trained.data / "mine_val_*.bin")
    say(convert.main, "convert", trained.run, "hf", "--to", "hf")
    out = say(train_main, *flags(trained.data, Path("none"), "-e", "hf", "--tokenizer", "none"))
    assert tables.of_run(Path("none")) == [] and out.split("---\n")[1].split()[0].isdigit()
    assert "note    no tokenizer is written" in say(convert.main, "convert", "none", "out", "--to", "hf")
