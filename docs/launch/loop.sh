#!/bin/sh
# Trains until the run is complete: starts train.py again whenever something ends it. Start it from the repository.
#
#     OUT=runs/124M STEPS=18865 docs/launch/loop.sh -e d12 -i "data/train_*.bin" -j "data/val_*.bin" -b 32
#
#   OUT      the run's folder (train.py's -o)
#   STEPS    how many steps in all (-x)
#   EVERY    save every so many steps (-n; default 1000): a crash costs at most those
#   PYTHON   the interpreter (default python3)
#   PAUSE    seconds between two starts (default 10)
#   TRIES    ends after so many starts in a row without a new checkpoint (default 5)
#
# Everything else is train.py's flags. Ctrl-C stops the run after the step at hand and saves; the same command goes on.

out=${OUT:?"set OUT to the folder of the run"}
steps=${STEPS:?"set STEPS to the number of steps"}
complete=$out/DONE_$(printf %08d "$steps")

checkpoints() {
    ls "$out" 2>/dev/null | grep '^DONE_'
}

tries=0
while [ ! -f "$complete" ]; do
    before=$(checkpoints)
    "${PYTHON:-python3}" train.py -o "$out" -x "$steps" -y 1 -n "${EVERY:-1000}" "$@"
    status=$?
    case $status in
        0) [ -f "$complete" ] || echo "loop.sh: done, but without $complete (a run may stop early: --patience)" >&2; exit 0 ;;
        2 | 3 | 130) exit "$status" ;; # a flag or file that cannot be used, divergence, stopped: once more helps nothing
    esac
    tries=$((tries + 1))
    [ "$before" = "$(checkpoints)" ] || tries=0
    if [ "$tries" -ge "${TRIES:-5}" ]; then
        echo "loop.sh: $tries starts in a row came to no new checkpoint; the last one ended with status $status" >&2
        exit "$status"
    fi
    echo "loop.sh: train.py ended with status $status; going on from the newest good checkpoint" >&2
    sleep "${PAUSE:-10}"
done
