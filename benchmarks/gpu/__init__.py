"""What benchmarks/gpu_check.py measures on a GPU: a module for each kind, and the plan of all."""
