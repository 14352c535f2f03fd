"""What a run reads, opened and checked before anything else is begun: model, token files, tokenizer, questions.

Files only; the processes of a run come together for the search of the newest checkpoint alone. Leaves out the devices
(trials/here.py), and the weights themselves (weights.py).
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from llmc_jax import cluster
from llmc_jax.base.commands import typed
from llmc_jax.base.errors import InputError, naming
from llmc_jax.checkpoint import sources
from llmc_jax.checkpoint.llmc import FILES
from llmc_jax.checkpoint.published import model_named
from llmc_jax.checkpoint.source import Source, gpt2_shape
from llmc_jax.checkpoint.store import Checkpoint, check
from llmc_jax.checkpoint.tokenizer import own_tokenizer
from llmc_jax.cluster.agreement import alike
from llmc_jax.config.checks import check_model_fit, with_devices
from llmc_jax.config.flags import models_not_asked_for
from llmc_jax.config.model import ModelShape, attention_of, refuse_foresight
from llmc_jax.config.train import BY_NAME, TrainConfig, of_test
from llmc_jax.data import tables
from llmc_jax.data.corpora import Corpus, stdlib_corpus
from llmc_jax.data.evalfile import Item, check_fit
from llmc_jax.data.loader import TokenLoader, continued, of_processes
from llmc_jax.data.tasks import read_items
from llmc_jax.data.tokenizers import Choice, Tokenizer, bytes_tokenizer, fitted, load_tokenizer
from llmc_jax.machine.algorithms import kept
from llmc_jax.models.family import accept, chosen, described, of_family, parsed
from llmc_jax.plan.asked import with_attention
from llmc_jax.plan.plan import Repeat
from llmc_jax.run.resume import find_earlier, repeated, with_batch_of
from llmc_jax.training.rules import named

CHECKED_TOKENS = 1 << 20  # of each data set, before the run begins: takes a tenth of a second


class Model(NamedTuple):
    """What `-e` names, or --init-from."""

    config: ModelShape
    source: Source | None  # of the weights; None: random ones, or those of the checkpoint that the run resumes from
    published: str = ""  # its name on Hugging Face, where -e says that and not a path

    @property
    def path(self) -> Path | None:
        """Return the path of the weights, if they come from a checkpoint."""
        return None if self.source is None else self.source.path

    @property
    def name(self) -> str:
        """Return the name of what the weights come from, of a training state its run's; empty where from nothing."""
        if self.source is None or self.published:
            return self.published
        return self.source.path.resolve().parent.name if self.source.kind == "state" else self.source.path.stem


class Data(NamedTuple):
    """What `-i` and `-j` name; None where the run does not read it (no steps, no validation)."""

    train: TokenLoader | None
    val: TokenLoader | None
    corpus: Corpus | None  # the built-in one, if it is that

    @property
    def loaders(self) -> list[TokenLoader]:
        """Return those that there are, that of training first."""
        return [loader for loader in (self.train, self.val) if loader is not None]


class Inputs(NamedTuple):
    """What a run reads."""

    asked: TrainConfig  # the configuration as the command line has it
    config: TrainConfig  # with the number of devices and the copy of --algorithms, without what --find-lr leaves out
    model: Model
    earlier: Checkpoint | None  # the checkpoint that is resumed
    before: Repeat | None  # an earlier choice of kernels, which is taken again
    data: Data  # with -b auto read a row at a time
    tokenizer: Choice
    questions: Sequence[Item]  # of HellaSwag; none: it is not evaluated
    notes: list[str]
    warnings: list[str]


def inputs(asked: TrainConfig, available: Callable[[], tuple[int, str]]) -> Inputs:
    """Open and check what a run reads. Raises InputError for what cannot be used.

    available: says how many devices each process has, and on which platform: gpu, cpu.
    """
    warnings: list[str] = []
    config = of_test(asked)
    with alike("model file"):
        family = chosen(config.model_file)
        if config.model_changed:
            accept(family)
        named(config.optimizer)
    earlier = find_earlier(config, warnings.append)
    with alike("files"):
        config = replace(config, algorithms=kept(config.algorithms, config.output_dir))
        model = resolve_model(config, earlier)
        model = model._replace(config=with_attention(model.config, config))
        if config.sample_every or config.hellaswag:
            refuse_foresight(model.config, "-s and -h must be 0")
        notes = check_model_fit(config, model.config)
        if config.export_llmc:
            gpt2_shape(model.config, f"--export-llmc: {FILES}")
        config = with_devices(with_batch_of(earlier, config), *available(), cluster.here().size)
        data = open_data(replace(config, batch_size=max(1, config.batch_size)), model.config)
        tokenizer, doubts = tokenizer_of(config, model, data, earlier)
        if config.documents and earlier is None and (table := tokenizer.tokenizer) is not None:
            own = attention_of(model.config)._replace(documents=table.eot)  # not what the vocabulary's size suggests
            model = model._replace(config=replace(model.config, attention=own))
        questions, missing = open_questions(config, model.config, tokenizer)
        before = repeated(config, earlier)
    return Inputs(
        asked, config, model, earlier, before, data, tokenizer, questions, [*notes, *missing], [*warnings, *doubts]
    )


# ----- model ----------------------------------------------------------------------------------------------------------


def resolve_model(config: TrainConfig, earlier: Checkpoint | None = None) -> Model:
    """Return the model's shape, from a descriptor or from what holds its weights; reads none of them.

    earlier: what is continued; if -e says what it said then, the file that it named need not be there any more. A shape
    that -e describes beside --init-from must be that of the weights.
    """
    if earlier is not None and _names_nothing_new(config.model, earlier):
        return Model(of_family(earlier.metadata.identity.model, chosen(config.model_file)), None)
    family = chosen(config.model_file)
    flag, name = ("--init-from", config.init_from) if config.init_from else ("-e", config.model)
    with naming(flag):
        on_hub = model_named(name)
    there = on_hub is not None or Path(name).exists()
    if flag == "-e" and not name.endswith(".bin") and "/" not in name and (described(name, family) or not there):
        return Model(parsed(name, family), None)
    if not there:
        raise InputError(_not_there(config))
    with naming(flag):
        source = sources.open_source(name, model_file=config.model_file)
        if source.kind == "state" and source.path == Path(name) and (problem := check(source.path)):
            raise InputError(f"{name}: {problem}; take another checkpoint")
    shape = _checked_shape(config, source.config) if config.init_from else source.config
    return Model(shape, source, on_hub.repository.rpartition("/")[2] if on_hub else "")


def _not_there(config: TrainConfig) -> str:
    """Return what to say of a model that is no file. Nobody asked for the default one: something was forgotten."""
    name, default = config.model, config.model == TrainConfig().model
    if config.init_from:
        return f"--init-from {config.init_from}: no such file or folder; give a run's folder, or what -e takes"
    if default and config.reuse and not config.output_dir:
        return "-y 1: needs -o FOLDER, that of the run to resume; or begin a run with -e"
    if default and config.reuse:
        return f"-y 1 -o {config.output_dir}: there is no run with a checkpoint; check the path, or begin one with -e"
    shapes = "a shape such as d12 for random weights" + "; --preset demo beside other flags trains the demo" * default
    files = "no such file; give the path of an llm.c checkpoint or of a folder of Hugging Face's"
    return f"-e {name}: {files}, or {shapes}"


def _names_nothing_new(name: str, earlier: Checkpoint) -> bool:
    """Return whether -e need not be looked at: as it was then, a default, or a file that no longer exists."""
    is_file = name.endswith(".bin") or "/" in name
    said_then = earlier.metadata.options.get("model") == name
    return said_then or (is_file and (name in models_not_asked_for() or not Path(name).exists()))


def _checked_shape(config: TrainConfig, shape: ModelShape) -> ModelShape:
    """Return the shape of the checkpoint that --init-from names. Raises InputError if -e asks for another model."""
    name = config.model
    if name.endswith(".bin") or "/" in name:
        if name not in models_not_asked_for():
            raise InputError(f"-e {name} and --init-from {config.init_from} both name weights; leave one of them out")
    elif parsed(name, chosen(config.model_file)) != shape:
        raise InputError(f"-e {name}: the checkpoint that --init-from names has another shape, {shape}; leave -e out")
    return shape


# ----- data -----------------------------------------------------------------------------------------------------------


def open_data(config: TrainConfig, model: ModelShape) -> Data:
    """Open the loaders that the run needs. With -a both read the validation data, unshuffled, as llm.c has it."""
    train_name, train_flag = (config.val_data, "-j") if config.overfit else (config.train_data, "-i")
    needs_train, needs_val = config.max_steps != 0, config.val_every > 0
    named = [name for name, needed in ((train_name, needs_train), (config.val_data, needs_val)) if needed]
    corpus = stdlib_corpus() if "stdlib" in named else None

    def loader(name: str, flag: str, shuffle: bool) -> TokenLoader:
        if name == "stdlib":
            assert corpus is not None
            paths: Any = [corpus.train if flag == "-i" else corpus.val]
        else:
            paths = name
        B, T, n = config.batch_size, config.sequence_length, config.reading_processes
        with naming(flag):
            opened = TokenLoader(
                paths, B, T, vocab_size=model.vocab_size, shuffle=shuffle, flag=flag, seed=config.seed,
                process_rank=0 if n == 1 else None, num_processes=n,
            )  # fmt: skip
            check_tokens(opened)
        return opened

    shuffle = config.shuffle == "llmc" and not config.overfit
    return Data(
        train=loader(train_name, train_flag, shuffle) if needs_train else None,
        val=loader(config.val_data, "-j", False) if needs_val else None,
        corpus=corpus,
    )


def most_rows(data: Data) -> int:
    """Return the rows in the smallest file, more than which no batch may have. data: opened for batches of one row."""
    return min((min(each.samples_per_shard) for each in (data.train, data.val) if each is not None), default=1)


def check_tokens(loader: TokenLoader) -> None:
    """Read some batches and go back: ids that the model does not know end the run before it begins, if they are many,
    or the data is small. The loader checks the rest as it is read.
    """
    start = loader.state()
    at_once = loader.num_processes
    batch_tokens = loader.batch_size * loader.sequence_length
    batches = min(loader.batches_per_epoch, max(1, CHECKED_TOKENS // batch_tokens))
    for _ in range(-(-batches // at_once)):
        loader.next_batch(at_once)
    loader.restore(start)


def total_steps(config: TrainConfig, train: TokenLoader | None) -> int:
    """Return the steps of the run: as asked, or one epoch, as llm.c counts it."""
    if train is None or config.max_steps >= 0:
        return config.max_steps
    steps = train.num_tokens // config.tokens_per_step
    if steps == 0:
        raise InputError(
            f"-d {config.tokens_per_step}: one update takes more tokens than the training data holds "
            f"({train.num_tokens}); lower -d, give more data, or say how many steps to make with -x"
        )
    return steps


def validation_batches(config: TrainConfig, val: TokenLoader | None) -> int:
    """Return the batches of one validation as llm.c counts them: beyond the last the loader begins at the first again.

    Each of n processes reads -m of them; -1 is the number of tokens over n * B * T. A shard's last token is only a
    target, so this can be one batch more than there are.
    """
    if val is None:
        return 0
    n = val.num_processes
    return n * (val.num_tokens // (n * config.micro_batch_tokens) if config.val_batches == -1 else config.val_batches)


def continued_data(config: TrainConfig, earlier: Checkpoint | None, data: Data) -> Data:
    """Return the data as read by the processes that began the run, its training part where a checkpoint left it."""
    if earlier is None or data.train is None or config.overfit or earlier.metadata.loader is None:
        return data
    with naming("-i"):
        train, val = continued(data.train, earlier.metadata.loader, config.micro_batches), data.val
    if val is not None and config.batch_order == "llmc":
        with naming("-j"):
            val = of_processes(val, train.num_processes)
    return data._replace(train=train, val=val)


# ----- tokenizer and questions ----------------------------------------------------------------------------------------


def tokenizer_of(config: TrainConfig, model: Model, data: Data, earlier: Checkpoint | None) -> tuple[Choice, list[str]]:
    """Return the tokenizer of a run, as its checkpoints name it, and warnings."""
    source = model.source if earlier is None else sources.open_source(earlier.folder)
    as_before = earlier is not None and earlier.metadata.options.get("tokenizer") == config.tokenizer
    found, doubts = choose_tokenizer(config.tokenizer, model.config.vocab_size, data, source, as_before)
    if found.tokenizer is not None:
        return found._replace(named=found.named or tables.named(found.tokenizer)), doubts
    if found.named is None and not config.sample_every:
        return found, doubts
    return found, [*doubts, f"samples are printed as token ids: {found.note}"]


def choose_tokenizer(
    asked: str, vocab_size: int, data: Data, source: Source | None, as_before: bool
) -> tuple[Choice, list[str]]:
    """Return the tokenizer of a run, and warnings: what --tokenizer asks for, else that of the data, else the model's.

    Where neither brings one, the vocabulary suggests it. source: of the weights. as_before: a run is resumed that was
    asked for the same. Raises InputError where data and model have unlike tables, and where a table of the data cannot
    be read or is too large for the model.
    """
    own = None if source is None else own_tokenizer(source)
    if asked == "none":
        known = None if own is None else own.named
        with suppress(InputError):  # whoever does without need not mend the table of the data
            known = known or next((tables.named(tokenizer) for _, tokenizer in _of_data(data)), None)
        return Choice(None, "no tokenizer was asked for", known), []
    if asked != "auto":
        found = own if own is not None and as_before and own.tokenizer else load_tokenizer(asked, vocab_size)
        assert found.tokenizer is not None
        named = tables.named(found.tokenizer)
        if own is not None and own.named is not None and as_before and own.named.sha256 not in ("", named.sha256):
            return own, [f"--tokenizer {asked} is another table by now: {own.note}"]
        return found._replace(named=found.named or named), []
    of_data = _of_data(data)
    if not of_data:
        return own or load_tokenizer("auto", vocab_size, [loader.paths[0].parent for loader in data.loaders]), []
    (words, tokenizer), *others = of_data
    named, doubts = tables.named(tokenizer), []
    if own is not None and own.named is not None:
        if own.tokenizer is not None:
            others.append((own.note, own.tokenizer))
        elif not own.named.sha256:
            doubts.append(f"whether {words} is the table of the model is not known: {own.note}")
        elif own.named.sha256 != named.sha256:
            raise InputError(f"{words} is not the table of the model: {own.note}")
        named = own.named if own.named.sha256 == named.sha256 else named
    for other, another in others:
        tables.check_alike(words, tokenizer, other, another)
    return fitted(Choice(tokenizer, words, named), vocab_size), doubts


def _of_data(data: Data) -> list[tuple[str, Tokenizer]]:
    """Return the tables that the data was made with, and where each comes from."""
    corpus, paths = data.corpus, [path for loader in data.loaders for path in loader.paths]
    built_in = [] if corpus is None else [("the built-in corpus, in bytes", bytes_tokenizer())]
    others = paths if corpus is None else [path for path in paths if path not in (corpus.train, corpus.val)]
    return [*((tables.words(*each), each[1]) for each in tables.of_token_files(others)), *built_in]


def open_questions(config: TrainConfig, model: ModelShape, tokenizer: Choice) -> tuple[Sequence[Item], list[str]]:
    """Return HellaSwag's questions, none if the run does not evaluate it, and notes.

    Where llm.c's file is not there, the run continues without, as llm.c's does. Raises InputError for any other file
    that is not there, and for one that does not fit the model or T.
    """
    path = Path(config.hellaswag_file)
    if not config.hellaswag or config.val_every == 0:
        return (), []
    if config.hellaswag_file == BY_NAME["hellaswag_file"].default and not path.exists():
        made = f"`{typed('data')} hellaswag` makes it, --hellaswag-file names another"
        return (), [f"-h 1: there is no {path}, so HellaSwag is not evaluated; {made}"]
    with naming("--hellaswag-file"):
        questions = read_items("hellaswag", path, tokenizer.tokenizer, vocab_size=model.vocab_size)
        check_fit(questions, config.sequence_length, str(path))
    return questions, []
