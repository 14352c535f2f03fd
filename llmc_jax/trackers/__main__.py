"""python -m llmc_jax.trackers: started by a run, for each of its trackers."""

import sys

from llmc_jax.trackers.child import main

main(sys.argv[1:])
