#!/bin/sh
# Print the extra of JAX that fits this machine: cuda13, cuda12 or cpu (JAX=… overrules it). Only NVIDIA on Linux counts.
set -u
case ${JAX:-} in
'') ;;
cpu | cuda12 | cuda13) echo "$JAX" && exit ;;
*) echo "JAX=$JAX: must be cpu, cuda12 or cuda13" >&2 && exit 1 ;;
esac

gpus=$([ "$(uname -s)" = Linux ] && nvidia-smi --query-gpu=driver_version,compute_cap --format=csv,noheader 2>/dev/null)
# JAX's CUDA 13 needs driver 580 and compute capability 7.5 (Turing); its CUDA 12 needs driver 525 and 5.2 (Maxwell).
echo "$gpus" | awk -F '[., ]+' '
    !/^[0-9]/ { next }
    { driver = $1; capability = $(NF - 1) * 10 + $NF; if (!n++ || capability < least) least = capability }
    END {
        if (driver >= 580 && least >= 75) print "cuda13"
        else if (driver >= 525 && least >= 52) print "cuda12"
        else {
            print "cpu"
            if (n) print "NVIDIA driver " driver " or the GPU is too old for JAX: training on the CPU" >"/dev/stderr"
        }
    }'
