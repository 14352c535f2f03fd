#!/bin/sh
# Checks and measures everything on a machine with an NVIDIA GPU: benchmarks/gpu.md. Installs nothing.
#   PYTHON   the interpreter to use, with jax for CUDA and numpy (default python3)
#   LLMC     a folder with llm.c's train_gpt2cu and train_gpt2fp32cu (optional; gpu.md says how to build them)
root=$(cd "$(dirname "$0")/.." && pwd) || exit
exec "${PYTHON:-python3}" -u "$root/benchmarks/gpu_check.py" "$@"
