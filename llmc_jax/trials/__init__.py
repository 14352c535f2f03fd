"""Kernels tried on the machine at hand: are they right, and is a step on them the fastest?

children.py   the measuring processes, for their parent; what a measurement gives
worker.py     the measuring process
problems.py   each operation as a problem: random inputs, who solves it, the answer in float64
numerics.py   errors beside that answer, and whether the bits repeat
candidates.py what is tried for a run, at its own shapes
check.py      one of them tried, and a whole step on several beside XLA's
known.py      what was found out before
start.py      all of it before a run: which kernels are right, and with which of them the step is the fastest
here.py       what this machine is, and what is known of its kernels: for a plan
command.py    llmc-jax kernels
"""
