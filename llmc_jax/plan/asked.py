"""What is to be planned: words of the command line to a configuration, and the shape of the model that it names.

Neither the model's file nor the token files need be there. Leaves out the machine (answer.py). Knows no JAX.
"""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmc_jax.base.errors import InputError
from llmc_jax.config.checks import check_model_fit, validate
from llmc_jax.config.flags import STEP_MODEL, given_options, models_not_asked_for, parse_args
from llmc_jax.config.model import PUBLISHED, ModelShape, attention_of
from llmc_jax.config.train import TrainConfig
from llmc_jax.data.tokenizers import usual_eot
from llmc_jax.models.family import chosen, described, parsed


def asked_config(words: str | Sequence[str]) -> TrainConfig:
    """Return the configuration that train.py's flags describe, checked as far as it can be without a machine.

    Without -e the model is the preset's, or STEP_MODEL. What is only sampled is left out: it need not fit the model.
    -pn counts as so many devices where --devices does not say how many. Raises InputError.
    """
    words = shlex.split(words) if isinstance(words, str) else list(words)
    given = given_options(["-e", STEP_MODEL, *words])
    if given.flags.get("devices") == 0:
        raise InputError("--devices 0: a plan must know how many; write it, or leave --devices out for one GPU")
    model = given.preset.get("model", STEP_MODEL)
    config = parse_args(["-e", model, *words])
    config = replace(config, devices=config.devices or config.num_processes, sample_every=0)
    validate(config)
    return config


def model_of(name: str, model_file: str = "") -> ModelShape:
    """Return the shape that -e names: a descriptor, or a checkpoint of any format; of gpt2, no file is needed.

    model_file: that of --model, whose family the descriptors are of.

    A file that a preset names and that is not here is STEP_MODEL's. Raises InputError.
    """
    here, family = Path(name).exists(), chosen(model_file)
    if not here and not described(name, family) and name in models_not_asked_for():
        name = STEP_MODEL
    name = name if here else PUBLISHED.get(name.removeprefix("hf:").removeprefix("openai-community/"), name)
    if name.startswith("hf:"):
        raise InputError(
            f"-e {name}: its shape is known once it is downloaded; give its folder, or a shape ({STEP_MODEL})"
        )
    if described(name, family) or not (here or name.endswith(".bin")):
        shape: ModelShape = parsed(name, family)
        return shape
    if not here:
        raise InputError(f"-e {name}: no such file; a shape is enough here, as in -e {STEP_MODEL}")
    from llmc_jax.checkpoint.sources import open_source  # here, because a shape does without

    return open_source(Path(name), model_file=model_file).config


def with_attention(model: ModelShape, config: TrainConfig) -> ModelShape:
    """Return a model with the attention that flags ask for; what they leave out stays. Raises InputError."""
    flags = {
        "weights": "relu" if config.attention == "relu" else "", "window": config.attention_window,
        "prefix": config.attention_prefix, "bias": config.attention_bias, "softcap": float(config.attention_softcap),
    }  # fmt: skip
    changed: dict[str, Any] = {name: value for name, value in flags.items() if value}
    if config.documents and attention_of(model).documents < 0:
        changed["documents"] = usual_eot(model.vocab_size)
    if not changed:
        return model
    if not hasattr(model, "attention"):
        raise InputError(f"--model: the family {model.family} has no attention, so it can have no {min(changed)}")
    return replace(model, attention=attention_of(model)._replace(**changed))


def checked_model(config: TrainConfig) -> ModelShape:
    """Return the model of a configuration, which its rows fit. Raises InputError."""
    model = with_attention(model_of(config.init_from or config.model, config.model_file), config)
    check_model_fit(config, model)
    return model
