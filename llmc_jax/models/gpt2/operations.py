"""GPT-2's operations by name: what each takes and what it makes, in the order in which the model runs them.

The model itself is written out (model.py), and what it fuses stands here apart. A profile weighs those of one named
scope together (work.py). Leaves out the update.
"""

from llmc_jax.models.gpt2.tensors import ACTIVATIONS
from llmc_jax.models.tensors import Operation, Tables

EMBEDDING = Operation("embedding", "embedding_forward", ("x",), ("wte", "wpe"), ("encoded",))
BLOCK = (
    Operation("ln1", "residual_forward", ("below.residual2", "below.fcproj"), (), ("residual1",)),
    Operation("ln1", "layernorm_forward", ("residual1",), ("ln1w", "ln1b"), ("ln1_mean", "ln1_rstd", "ln1")),
    Operation("qkv", "linear_forward", ("ln1",), ("qkvw", "qkvb"), ("qkv",)),
    Operation("attention", "attention_forward", ("qkv",), (), ("att", "atty")),
    Operation("attproj", "linear_forward", ("atty",), ("attprojw", "attprojb"), ("attproj",)),
    Operation("ln2", "residual_forward", ("residual1", "attproj"), (), ("residual2",)),
    Operation("ln2", "layernorm_forward", ("residual2",), ("ln2w", "ln2b"), ("ln2_mean", "ln2_rstd", "ln2")),
    Operation("fc", "linear_forward", ("ln2",), ("fcw", "fcb"), ("fch",)),
    Operation("gelu", "gelu_forward", ("fch",), (), ("fch_gelu",)),
    Operation("fcproj", "linear_forward", ("fch_gelu",), ("fcprojw", "fcprojb"), ("fcproj",)),
)
END = (
    Operation("lnf", "residual_forward", ("below.residual2", "below.fcproj"), (), ("residual1",)),
    Operation("lnf", "layernorm_forward", ("residual1",), ("lnfw", "lnfb"), ("lnf_mean", "lnf_rstd", "lnf")),
    Operation("head", "linear_forward", ("lnf",), ("wte",), ("logits",)),
    Operation("classifier", "classifier_forward", ("logits", "y"), (), ("losses",)),
    Operation("classifier", "mean", ("losses",), (), ("loss",)),
)

END_BACKWARD = (
    Operation("classifier", "classifier_backward", ("logits", "y"), (), ("dlogits",)),
    Operation("head", "linear_backward", ("dlogits", "lnf"), ("wte",), ("dlnf", "dwte_head")),
    Operation(
        "lnf", "layernorm_backward", ("dlnf", "residual1", "lnf_mean", "lnf_rstd"), ("lnfw",),
        ("dresidual1", "dlnfw", "dlnfb", "below.dfcprojb"),
    ),
)  # fmt: skip
BLOCK_BACKWARD = (
    Operation("fcproj", "linear_backward", ("dresidual3", "fch_gelu"), ("fcprojw",), ("dfch_gelu", "dfcprojw")),
    Operation("gelu", "gelu_backward", ("dfch_gelu", "fch"), (), ("dfch", "dfcb")),
    Operation("fc", "linear_backward", ("dfch", "ln2"), ("fcw",), ("dln2", "dfcw")),
    Operation(
        "ln2", "residual_layernorm_backward", ("dresidual3", "dln2", "residual2", "ln2_mean", "ln2_rstd"), ("ln2w",),
        ("dresidual2", "dln2w", "dln2b", "dattprojb"),
    ),
    Operation("attproj", "linear_backward", ("dresidual2", "atty"), ("attprojw",), ("datty", "dattprojw")),
    Operation("attention", "attention_backward", ("datty", "qkv", "atty", "att"), (), ("dqkv", "dqkvb")),
    Operation("qkv", "linear_backward", ("dqkv", "ln1"), ("qkvw",), ("dln1", "dqkvw")),
    Operation(
        "ln1", "residual_layernorm_backward", ("dresidual2", "dln1", "residual1", "ln1_mean", "ln1_rstd"), ("ln1w",),
        ("dresidual1", "dln1w", "dln1b", "below.dfcprojb"),
    ),
)  # fmt: skip

TABLES = Tables(ACTIVATIONS, EMBEDDING, BLOCK, END, END_BACKWARD, BLOCK_BACKWARD)
