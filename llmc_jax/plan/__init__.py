"""Memory, time and cost of a run on a machine that need not be there: `llmc-jax plan --help`.

plan.py          precision, kernels, memory and the step's numbers, which runs and measurements take from there
efficiency.py    a machine's peaks, what shares of them are reached, and the floors they set
time.py          what a step takes, operation by operation
cpu.py           the same on a CPU, by rates that are measured on it
network.py       what several devices take to send each other their gradients
compiled.py      the step of a plan, compiled for GPUs that are not there
program.py       what a compiled program consists of, and which operation of the model each instruction belongs to
memory.py        a step's memory by kind, computed from shapes alone, or as much as the compiler says
moments.py       what a step's program holds from moment to moment, from shapes alone
separate.py      programs compiled in processes of their own, and kept by content
course.py        a run's steps, hours and cost; prices.toml: what an hour of a GPU costs, dated
sweep.py         a configuration with each value of an option, or on each GPU: as a table
search.py        the largest -b that fits, for each -r, --recompute-blocks and -z
fits.py          a step that does not fit, and the -b that would, for refusals
asked.py         words of the command line to what is planned
answer.py        what each configuration of a model takes on a device, as plain data; report.py: as text
"""
