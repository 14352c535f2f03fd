"""What a configuration comes to on a machine that need not be there: `python -m llmc_jax.plan --help`.

plan.py          precision, kernels, memory and the step's numbers, which runs and measurements take from there
interval.py      an estimate as three numbers
compiled.py      the step of a plan, compiled for GPUs that are not there
"""
