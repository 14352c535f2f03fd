"""Where a training step's time, memory and operations go: `llmc-jax profile --help`.

command.py       its command line
modes.py         what each mode prints and writes
models/work.py   FLOPs, bytes and memory from the shape alone
plan/program.py       what a compiled program consists of, and which operation of the model each instruction belongs to
trace.py         a recording of jax.profiler read back: when each instruction ran
measure.py       the step itself: compiled, timed, beside the machine's own rates
table.py         all of these put together: the table, as text and JSON
compare.py       another implementation or precision, in turns with this one
"""
