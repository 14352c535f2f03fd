"""Models on Hugging Face by name: `gpt2` and its sisters, `hf:OWNER/NAME`, as folders on this machine.

A snapshot in Hugging Face's own cache is read where it lies; nothing is ever written there. Otherwise the files are
downloaded into a folder in our cache, the config.json first, which refuses what is no GPT-2. Leaves out reading the
folder (hugging_face.py), the download itself (data/download.py) and the server's interface (data/hub.py).

Sizes and digests are those that independent projects state; what none states the server's list of files says. It is
kept beside the files, so that nothing is asked a second time.
"""

import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from llmc_jax.base.errors import FormatError, InputError
from llmc_jax.base.files import cache_folder, json_text, made_folder, read_json_object, refusing, write_bytes
from llmc_jax.base.plain import from_json, to_json
from llmc_jax.checkpoint.hugging_face import INDEX, LARGEST_CONFIG, WEIGHTS, files_of_tensors, read_config
from llmc_jax.data import hub
from llmc_jax.data.download import Remote, fetch, shown
from llmc_jax.data.hf_tokenizer import FILES as TOKENIZER_FILES
from llmc_jax.data.hub import File

CONFIG = "config.json"
LISTED = "files.json"  # in a folder of ours: of which commit the files are, their sizes and digests
SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
NAME = re.compile(r"hf:(\w[\w.-]*/\w[\w.-]*)(?:@(\w[\w./-]*))?", re.ASCII)


class Published(NamedTuple):
    """A model. repository: OWNER/NAME. revision: a commit, branch or tag. files: what is known of them beforehand.

    LISTED holds one too, with the commit and the files that the server has named.
    """

    repository: str
    revision: str
    files: tuple[File, ...] = ()


def _row(name: str, revision: str, *facts: tuple[int | None, str]) -> Published:
    """Return a row of the table. facts: the sizes and sha256 of config.json and model.safetensors, if known."""
    table = (1355256, "8414cab924d8b9b33013f0d221c5862f365ee9be39c5c2bfae8a5a9e970478a6")
    known = zip((CONFIG, WEIGHTS, "tokenizer.json"), (*facts, table), strict=True) if facts else ()
    return Published(f"openai-community/{name}", revision, tuple(File(path, *fact, path) for path, fact in known))


_ROWS = (
    _row(
        "gpt2",
        "607a30d783dfa663caf39e06633721c8d4cfcd7e",
        (665, "0daed7749b4f02b8f76240d5444551d7b08712dab4d0adb8239c56ba823bb7b4"),
        (548105171, "248dfc3911869ec493c76e65bf2fcf7f615828b0254c12b473182f0f81d3a707"),
    ),
    _row(
        "gpt2-medium",
        "6dcaa7a952f72f9298047fd5137cd6e4f05f41da",
        (718, "ef1a44d889ad1a0acc7731c78134f1b87d2d222f110e97dd10fd4117331caf22"),
        (1519984962, "fc5a354a19255ad494f3d71549390baca1ccf61d1d822b9408971705c687c9cd"),
    ),
    _row("gpt2-large", "32b71b12589c2f8d625668d2335a01cac3249519"),
    _row(
        "gpt2-xl",
        "15ea56dee5df4983c59b2538573817e1667135e2",
        (None, "be48115d52314bc27327e160bf10197760db02ea689d10adb24db4102edf7a8a"),
        (None, "0f8b28eb05a8075f48b61b6f35332978c74fc7763fa9fb4051a1c30511736a6a"),
    ),
)
GPT2 = {row.repository: row for row in _ROWS}


def model_named(name: str) -> Published | None:
    """Return the model that a name stands for; None for any other name, and where a file or folder has it.

    Names are gpt2, gpt2-medium, gpt2-large, gpt2-xl, hf:OWNER/NAME and hf:OWNER/NAME@REVISION. Raises InputError for
    what begins as the last two, and goes on otherwise.
    """
    if os.path.lexists(name):
        return None
    if not name.startswith("hf:"):
        return GPT2.get(f"openai-community/{name.removeprefix('openai-community/')}")
    match = NAME.fullmatch(name)
    if match is None:
        raise InputError(f"{name}: expected hf:OWNER/NAME, or hf:OWNER/NAME@REVISION")
    known = GPT2.get(match[1])
    return known if known and match[2] in (None, known.revision) else Published(match[1], match[2] or "main")


def folder_of(model: Published) -> Path:
    """Return the folder of a model, downloaded where it is neither in Hugging Face's cache nor in ours.

    What is interrupted goes on where it stopped. Raises InputError, one line, where a file cannot be had.
    """
    return _snapshot(model) or _downloaded(model)


def _snapshot(model: Published) -> Path | None:
    """Return the model's folder in Hugging Face's cache, if all of it is there; the older names had no owner."""
    cache = Path(os.environ.get("HF_HUB_CACHE") or hub.home() / "hub").expanduser()
    for name in (model.repository, model.repository.removeprefix("openai-community/")):
        folder = cache / f"models--{name.replace('/', '--')}"
        try:
            revision = (folder / "refs" / model.revision).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            revision = model.revision
        if _is_whole(snapshot := folder / "snapshots" / revision):
            return snapshot
    return None


def _is_whole(folder: Path) -> bool:
    try:
        weights = set(files_of_tensors(folder / INDEX).values()) if (folder / INDEX).is_file() else {WEIGHTS}
    except FormatError:
        return False
    return all((folder / name).is_file() for name in (CONFIG, *weights))


def _downloaded(model: Published) -> Path:
    name = f"{model.repository.replace('/', '--')}@{quote(model.revision, safe='')}"
    folder = cache_folder() / "models" / name
    advice = f"put {CONFIG} and {WEIGHTS} of {hub.ENDPOINT}/{model.repository} into a folder and give its path"
    revision, files = _files(model, folder / LISTED, advice)
    missing = [file for file in files if not (folder / file.path).exists()]
    if not missing:
        return folder
    with shown(sum(file.size or 0 for file in missing)) as report:
        for file in missing:
            if file.path != CONFIG:
                read_config(folder / CONFIG)  # before anything large
            url = hub.file_url(model.repository, revision, file.path)
            facts = file.size, file.sha256, file.sha1, hub.token()
            source = Remote(url, f"{model.repository}, {file.path}", advice, *facts)
            fetch(source, folder / file.path, partial(report, file.path))
    return folder


def _files(model: Published, listed: Path, advice: str) -> tuple[str, list[File]]:
    """Return the commit and the files of a model, its config.json first: as we know them, or the server listed them.

    Raises InputError if the list cannot be had.
    """
    if model.files:
        return model.revision, list(model.files)
    if not listed.is_file():
        commit = model.revision
        if re.fullmatch("[0-9a-f]{40}", commit) is None:
            commit = hub.commit_of(model.repository, commit, advice)
        files = _chosen(model, hub.list_files(model.repository, commit, "", advice))
        advice = "set LLMC_JAX_CACHE to a folder that can"
        with refusing(f"{listed}: cannot be written", advice), made_folder(listed.parent):
            write_bytes(listed, json_text(to_json(Published(model.repository, commit, tuple(files)))).encode())
    try:
        kept: Published = from_json(Published, read_json_object(listed, LARGEST_CONFIG))
    except ValueError:
        raise FormatError(f"{listed}: is no list of files; remove it") from None
    return kept.revision, list(kept.files)


def _chosen(model: Published, files: Sequence[File]) -> list[File]:
    """Return those of a repository's files that are read here, the config.json first. Raises InputError."""
    found = {file.path: file for file in files}
    weights = [WEIGHTS] if WEIGHTS in found else [path for path in found if path == INDEX or SHARD.fullmatch(path)]
    if CONFIG not in found or not weights:
        missing = CONFIG if CONFIG not in found else f"{WEIGHTS}, nor {INDEX}"
        raise InputError(f"{model.repository}: on {hub.endpoint()} it has no {missing}; take another model")
    return [found[path] for path in (CONFIG, *TOKENIZER_FILES, *weights) if path in found]
