"""What a program needs before it imports its own modules: its Python, its packages, one line for Ctrl-C.

Imports nothing of ours, and old Pythons can read it, so that it can say what is missing.
"""

import os
import sys


def enter() -> None:
    """Let a program end with one line, not a traceback, where Python is too old, a package is missing, or at Ctrl-C."""
    if sys.version_info < (3, 12):  # noqa: UP036  whoever types `python3` may have any version
        name = "llmc_jax" if sys.argv[0] == "-m" else os.path.basename(sys.argv[0])
        print(f"{name}: Python 3.12 or newer is needed; `make setup` finds one", file=sys.stderr)
        sys.exit(2)
    sys.excepthook = one_line


def one_line(kind: type, error: BaseException, traceback: object) -> None:
    """Print why a program ends, and raise SystemExit with its status; show a mistake of ours as Python does."""
    words = sys.orig_argv[-len(sys.argv) :]  # the script or the module, which sys.argv does not name yet, and its flags
    program = os.path.basename(words[0])
    package = str(getattr(error, "name", "")).partition(".")[0]
    if isinstance(error, KeyboardInterrupt):
        print(f"{program}: stopped", file=sys.stderr)
        raise SystemExit(130)
    if not isinstance(error, ModuleNotFoundError) or package in ("", "None", "llmc_jax", "pallas_kernels"):
        sys.__excepthook__(kind, error, error.__traceback__)
        return
    import shlex  # here, because Ctrl-C may come with the first import

    advice = f"run `make setup`, then `{shlex.join(['.venv/bin/python', *sys.orig_argv[1:]])}`, or `pip install .`"
    print(f"{program}: needs the package {package}: {advice}", file=sys.stderr)
    raise SystemExit(2)
