"""HellaSwag's accuracy between two steps: its questions answered on all devices, logged and shown.

Leaves out the questions (data/), how the likeliest completion is found (evaluate/), and when this is due (due.py).
"""

from llmc_jax import cluster
from llmc_jax.config.train import attention_computed
from llmc_jax.evaluate.choices import answers, rows_of_items
from llmc_jax.generate.model import RELU
from llmc_jax.generate.scorer import TOKENS_ON_CPU, TOKENS_ON_GPU, Scored, Scorer, score
from llmc_jax.models.gpt2.model import PLAIN
from llmc_jax.run.state import Progress, Run, Setup


def evaluate(run: Run, progress: Progress) -> Progress:
    """Log how many of HellaSwag's questions are answered right; nothing if the user stops the run meanwhile."""
    setup, found = run.setup, list[Scored]()
    rows = sum(len(item.completions) for item in setup.questions)

    def stop() -> bool:
        cluster.here().phase("evaluate", progress.step)  # whose limit is for one computation
        return run.votes.ask()

    cluster.here().phase("evaluate", progress.step)
    for each in score(scorer_of(setup, progress), rows_of_items(setup.questions), stop=stop):
        found.append(each)
        run.console.doing(f"HellaSwag {len(found) / rows:.0%}")
    run.console.doing("")
    if run.stop.is_set():
        return progress
    answered = answers(setup.questions, found)
    items, correct_norm = len(answered), sum(each.right_norm for each in answered)  # the latter is llm.c's figure
    correct = sum(each.right for each in answered)
    run.log.accuracy(progress.step, items=items, correct=correct, correct_norm=correct_norm)
    run.console.accuracy(correct_norm, items)
    # as after a validation: a checkpoint that a stopped run left of this step is without it
    saving = -1 if progress.saving == progress.step else progress.saving
    return progress._replace(counters=progress.counters._replace(evaluated=progress.step), saving=saving)


def scorer_of(setup: Setup, progress: Progress) -> Scorer:
    """Return the model as it is, computed by XLA's operations: rows are short, and no kernel was tried at their sizes.

    On a GPU a batch has no more tokens than a step that is not tiny, so that there is memory for it.
    """
    plain = RELU if attention_computed(setup.config.attention) == "relu" else PLAIN
    execution = plain._replace(compiler_options=setup.plan.execution.compiler_options)
    tokens = setup.config.batch_size * setup.config.sequence_length
    on_gpu = min(max(TOKENS_ON_CPU, tokens), TOKENS_ON_GPU)
    at_once = TOKENS_ON_CPU if setup.device.platform == "cpu" else on_gpu
    return Scorer(progress.state.weights, setup.model, execution, setup.place, at_once)
