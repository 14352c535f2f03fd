"""Models on Hugging Face by name: from a server on this machine or a cache, for each command; what is refused."""

import hashlib
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))

from server import Files, serving

from llmc_jax import library
from llmc_jax.base.errors import InputError
from llmc_jax.checkpoint import convert
from llmc_jax.checkpoint.published import GPT2, Published, folder_of, model_named
from llmc_jax.checkpoint.sources import flat_parameters, open_source
from llmc_jax.compare import command as compare
from llmc_jax.config.model import parse_descriptor
from llmc_jax.config.train import TrainConfig
from llmc_jax.data import download, hub
from llmc_jax.evaluate import command as evaluate
from llmc_jax.generate import command as generate
from llmc_jax.plan.asked import model_of
from llmc_jax.run.inputs import resolve_model

SHAPE = "L1-NH1-C16-V257-T16"
REPOSITORY = "openai-community/gpt2"
COMMIT, OTHER = "a1" * 20, "b2" * 20
NAMES = ("config.json", "vocab.json", "merges.txt", "model.safetensors")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small GPT-2 of random weights as a folder of Hugging Face's, with the tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("made") / "hf"
    assert convert.main(["convert", SHAPE, str(folder), "--to", "hf"]) == 0
    return folder


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Files]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(download, "PAUSES", (0.0,))
    monkeypatch.setattr(download, "WAIT_SECONDS", 0.01)
    for name in ("HF_HUB_OFFLINE", "HF_HUB_CACHE", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    values = {"no_proxy": "127.0.0.1", "HF_TOKEN": "secret", "HF_HOME": "theirs", "LLMC_JAX_CACHE": f"{tmp_path}/ours"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    with serving() as files:
        monkeypatch.setenv("HF_ENDPOINT", files.address)
        yield files


def publish(server: Files, made: Path, repository: str = REPOSITORY, names: tuple[str, ...] = NAMES) -> list[hub.File]:
    """Put a folder's files and the list of them on the server, as the main branch, which is COMMIT."""
    files, entries = [], []
    for name in names:
        data = (made / name).read_bytes()
        server.content[f"/{repository}/resolve/{COMMIT}/{name}"] = data
        files.append(hub.File(name, len(data), hashlib.sha256(data).hexdigest(), name))
        lfs = {"oid": files[-1].sha256, "size": len(data), "pointerSize": 130}
        entries.append({"type": "file", "path": name, "size": 130, "oid": "0", "lfs": lfs})
    server.content[f"/api/models/{repository}/revision/main"] = json.dumps({"sha": COMMIT}).encode()
    server.listings[f"/api/models/{repository}/tree/{COMMIT}"] = (entries, None)
    return files


@pytest.fixture
def gpt2(server: Files, made: Path, monkeypatch: pytest.MonkeyPatch) -> Files:
    """The server with a small model in the place of GPT-2, all of which is known beforehand."""
    monkeypatch.setitem(GPT2, REPOSITORY, Published(REPOSITORY, COMMIT, tuple(publish(server, made))))
    return server


def asked(server: Files) -> list[str]:
    return [each.path.rpartition("/")[2] for each in server.asked]


@pytest.mark.parametrize("row", GPT2.values(), ids=GPT2)
def test_a_row(row: Published) -> None:
    assert len(row.revision) == 40 and int(row.revision, 16)
    assert [file.path for file in row.files] in ([], ["config.json", "model.safetensors", "tokenizer.json"])
    assert all(file.sha256 and len(file.sha256) == 64 and int(file.sha256, 16) for file in row.files)


def test_each_command_takes_the_name(gpt2: Files, made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("text.txt").write_text("some text to evaluate")
    assert generate.main(["gpt2", "--tokenizer", "none", "--prompt", "300"]) == 2  # so that nothing is compiled
    assert evaluate.main(["gpt2", "--text", "text.txt", "-t", "99"]) == 2
    said = capsys.readouterr().err
    assert "256" in said and "T=16" in said
    assert asked(gpt2) == list(NAMES)
    assert {each.token for each in gpt2.asked} == {"Bearer secret"}
    assert convert.main(["convert", "gpt2", "model.bin"]) == 0
    assert compare.main(["checkpoints", "hf:openai-community/gpt2", "model.bin"]) == 0
    expected = flat_parameters(open_source(made))
    assert library.load("openai-community/gpt2").config == open_source(made).config
    for config in (replace(TrainConfig(), model="gpt2"), replace(TrainConfig(), init_from="gpt2")):
        model = resolve_model(config)
        assert model.name == "gpt2" and model.source is not None
        np.testing.assert_array_equal(flat_parameters(model.source), expected)
    assert len(gpt2.asked) == len(NAMES)  # once for all
    assert not Path("theirs").exists()
    assert model_of("gpt2").num_layers == 12  # a plan goes by the shape


def test_what_the_server_lists_is_kept(server: Files, made: Path) -> None:
    publish(server, made, "own/small")
    model = model_named("hf:own/small")
    assert model == Published("own/small", "main")
    folder = folder_of(model)
    assert asked(server) == ["main", COMMIT, *NAMES]
    kept = json.loads((folder / "files.json").read_bytes())
    assert (kept["revision"], [file["path"] for file in kept["files"]]) == (COMMIT, list(NAMES))
    for name in NAMES:
        assert (folder / name).read_bytes() == (made / name).read_bytes()
    (folder / "model.safetensors").unlink()
    server.content["/api/models/own/small/revision/main"] = json.dumps({"sha": OTHER}).encode()
    assert folder_of(model) == folder_of(model) == folder
    assert asked(server)[6:] == ["model.safetensors"]  # once, and still of the first commit
    assert model_named(f"hf:own/small@{COMMIT}") == Published("own/small", COMMIT)


def test_a_model_in_several_files(server: Files, made: Path) -> None:
    shards = made.with_name("shards")
    shutil.copytree(made, shards, dirs_exist_ok=True)
    name = "model-00001-of-00001.safetensors"
    (shards / "model.safetensors").rename(shards / name)
    tensors = json.loads((shards / name).read_bytes()[8:].split(b"}}")[0] + b"}}")
    index = {"weight_map": {tensor: name for tensor in tensors if tensor != "__metadata__"}}
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    publish(server, shards, "own/large", ("config.json", "model.safetensors.index.json", name))
    found = open_source("hf:own/large")
    np.testing.assert_array_equal(flat_parameters(found), flat_parameters(open_source(made)))
    theirs = Path(f"theirs/hub/models--own--huge/snapshots/{COMMIT}")
    shutil.copytree(found.path, theirs)
    assert open_source(f"hf:own/huge@{COMMIT}").path == theirs
    (theirs / name).unlink()
    with pytest.raises(InputError, match="404"):  # not all of it is there
        open_source(f"hf:own/huge@{COMMIT}")


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("gpt2", Path("elsewhere/models--openai-community--gpt2")),
        ("gpt2", Path("elsewhere/models--gpt2")),
        ("hf:own/small", Path("theirs/hub/models--own--small")),
    ],
)
def test_a_snapshot_in_the_cache_of_hugging_face_is_read(
    gpt2: Files, made: Path, monkeypatch: pytest.MonkeyPatch, name: str, folder: Path
) -> None:
    if name == "gpt2":
        monkeypatch.setenv("HF_HUB_CACHE", "elsewhere")
    else:
        (folder / "refs").mkdir(parents=True)
        (folder / "refs/main").write_text(COMMIT)
    shutil.copytree(made, folder / "snapshots" / COMMIT)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert open_source(name).path == folder / "snapshots" / COMMIT
    assert gpt2.asked == []
    assert not Path("ours").exists()


def test_a_file_of_that_name_wins(gpt2: Files, made: Path) -> None:
    shutil.copytree(made, "gpt2")
    assert open_source("gpt2").path == Path("gpt2")
    assert gpt2.asked == []


def test_what_cannot_be_had_is_said_in_one_line(
    server: Files, gpt2: Files, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(server, made, "own/bare", ("config.json", "vocab.json"))
    server.listings[f"/api/models/own/empty/tree/{COMMIT}"] = ([], None)
    server.status["/api/models/own/closed/revision/main"] = [401]
    other = made.with_name("other")
    shutil.copytree(made, other, dirs_exist_ok=True)
    (other / "config.json").write_text('{"model_type": "llama"}')
    publish(server, other, "own/llama")
    wrong = GPT2[REPOSITORY].files[0]._replace(sha256="0" * 64)
    monkeypatch.setitem(GPT2, "openai-community/gpt2-xl", Published(REPOSITORY, COMMIT, (wrong,)))
    for name, words in (
        ("hf:gpt2", "^hf:gpt2: expected hf:OWNER/NAME"),
        ("hf:own/none", "revision main of own/none.*404.*put config.json and model.safetensors of .*own/none into"),
        ("hf:own/closed", r"401.*HF_TOKEN is refused"),
        ("hf:own/bare", "it has no model.safetensors"),
        (f"hf:own/empty@{COMMIT}", "it has no config.json"),
        ("hf:own/llama", "model_type is 'llama'"),
        ("gpt2-xl", "sha256 .* expected 0000"),
    ):
        with pytest.raises(InputError, match=words) as caught:
            open_source(name)
        assert "\n" not in str(caught.value)
    assert "model.safetensors" not in asked(server)
    server.asked.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("gpt2", "hf:own/small"):
        with pytest.raises(InputError, match=r"HF_HUB_OFFLINE is set.*put config.json and model.safetensors of https"):
            open_source(name)
    assert server.asked == []


@pytest.mark.parametrize("name", ["gpt2-xl", "openai-community/gpt2-xl", "hf:openai-community/gpt2-xl"])
def test_the_shape_of_a_known_name_needs_no_file(name: str) -> None:
    assert model_of(name) == parse_descriptor("d48")
    with pytest.raises(InputError, match="hf:owner/name: its shape is known once it is downloaded"):
        model_of("hf:owner/name")
