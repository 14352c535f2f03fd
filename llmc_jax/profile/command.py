"""The profiler's command line: llmc-jax profile --help. Leaves out what each of its modes prints (modes.py)."""

from llmc_jax.base.errors import ExitCode
from llmc_jax.base.kit import command_line
from llmc_jax.config.flags import step_config, take_own
from llmc_jax.profile.flags import OWN, help_text


@command_line("profile")
def main(words: list[str]) -> int:
    """Run `llmc-jax profile`."""
    if "--help" in words:
        print(help_text())
        return ExitCode.DONE
    if words[:1] == ["--worker"]:
        from llmc_jax.profile.compare import serve, stay_on_cores

        stay_on_cores()
        return serve(words[1:])
    own, rest = take_own(words, OWN)
    from llmc_jax.profile import modes  # here, because --help does without JAX

    if own.read:
        return modes.read(own)
    config, _ = step_config(rest)
    if own.calculate:
        return modes.calculate(config, own)
    if own.vs or own.threads:
        return modes.compare(rest, own)
    return modes.measure(config, own)
