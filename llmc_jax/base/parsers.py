"""What the command lines with commands share: argparse, without abbreviated flags, and the run of a command.

train.py, the profiler and the kernels read their words by hand (config/flags.py), since there the flags are llm.c's.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from llmc_jax.base.errors import InputError, raise_problems
from llmc_jax.base.files import write_atomic
from llmc_jax.base.kit import command_line, examples
from llmc_jax.base.options import SCREEN, Option, own, problems_together, read_value, show_value
from llmc_jax.base.plain import to_json


class Parser(argparse.ArgumentParser):
    """An argparse parser, and its commands', whose errors are InputErrors, and which takes no beginnings of flags.

    A value of the type Path, or "path" as text, may begin with `~`.

    shown: examples, words and what for.
    """

    def __init__(self, *, shown: Sequence[tuple[str, str]] = (), **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})
        self.register("type", "path", os.path.expanduser)
        self.register("type", Path, lambda word: Path(os.path.expanduser(word)))
        self.options: list[Option] = []
        self.shown = [(f"{self.prog} {words}", meaning) for words, meaning in shown]

    def add(self, options: Sequence[Option], title: str = "", words: str | None = None) -> None:
        """Add flags and arguments, under a title of --help and words on them."""
        group = self.add_argument_group(title, words) if title else self
        for about in options:
            settings: dict[str, Any] = {"help": about.meaning, "default": argparse.SUPPRESS}
            if about.switch:
                settings["action"] = "store_true"
            else:
                several, optional = "..." in about.value, about.value.startswith("[")
                settings["nargs"] = {(1, 0): "+", (0, 1): "?", (1, 1): "*"}.get((several, optional))
                settings["type"] = "path" if about.is_path else about.type
                settings |= {"choices": about.choices} if about.choices else {"metavar": about.value.strip("[.]")}
                settings |= {"const": about.alone} if about.alone is not None else {}
                if isinstance(about.default, list) and about.flags[0].startswith("-"):
                    settings["action"] = "extend" if several else "append"
            if about.flags[0].startswith("-"):
                settings["dest"] = about.name
            group.add_argument(*about.flags, **settings)
        self.options += options

    def format_help(self) -> str:
        """Return what --help prints, the examples last."""
        return super().format_help() + ("\n".join([*examples(self.shown), ""]) if self.shown else "")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return what the words say. Raises InputError for one that nothing takes."""
        found, rest = self.parse_known_args(args, namespace)
        for word in (each.partition("=")[0] for each in rest):
            what = "unknown flag" if word.startswith("-") else "a value without a flag"
            raise InputError(f"{show_value(word)}: {what}; --help lists all")
        return found

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return what the words say: all options' values, and as `given` their names that the words name."""
        found, rest = super().parse_known_args(args, namespace)
        if self.options and not rest:
            given = frozenset(about.name for about in self.options if hasattr(found, about.name))
            raise_problems(problems_together(self.options, given))
            missing = {about.name: about.default for about in self.options if about.name not in given}
            found.__dict__.update(missing, given=given)
        return found, rest

    def _get_value(self, action: argparse.Action, text: str) -> Any:
        about = next((about for about in self.options if about.name == action.dest), None)
        if about is None or text is argparse.SUPPRESS:  # the default of an argument that may be left out
            return text if about else super()._get_value(action, text)
        return read_value(about, about.long_flag, text)

    def error(self, message: str) -> NoReturn:
        """Raise InputError."""
        raise InputError(message.removeprefix("argument "))


def commands_line(name: str, make_parser: Callable[[], argparse.ArgumentParser]) -> Callable[..., int]:
    """Return the command line of a parser with commands, each of which has set itself as the default of `run`."""

    def run(words: list[str]) -> Any:
        options = make_parser().parse_args(words)
        return options.run(options)

    return command_line(name)(run)


JSON = own("--json", "", False, "print JSON")
JSON_FILE = own("--json", "[FILE]", None, "write the result as JSON to FILE (*.json); without FILE to the screen, in "
                "place of the tables", alone=SCREEN, writes="- .json")  # fmt: skip
DIFFERS = 4  # exit status of a comparison: what was compared does not agree


def write_json(result: Any, path: str) -> None:
    """Write a result to the path that JSON_FILE names. Numbers that are not finite become words: nan, inf, -inf."""
    written = json.dumps(to_json(result), indent=2, allow_nan=False) + "\n"
    sys.stdout.write(written) if path == SCREEN else write_atomic(path, written.encode())
