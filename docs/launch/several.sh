#!/bin/sh
# Starts several processes of one run on this machine. Start it from the repository.
#
#     N=2 docs/launch/several.sh -e d12 -i "data/train_*.bin" -j "data/val_*.bin" -b 32 -o runs/124M
#
#   N        how many processes
#   PORT     where process 0 waits for the others (default 12345)
#   PYTHON   the interpreter (default python3)
#
# Everything else is train.py's flags. On GPUs each process takes its share of them. Ctrl-C stops the run after the step at
# hand and saves. The status is that of the process that failed, where one did: not 75, which the others have for that.

n=${N:?"set N to the number of processes"}
pids= told=
tell() { # once: a second signal would end train.py before it has saved
    trap : INT TERM
    sleep 1 # a process that has just been started would not hear it
    for pid in $pids; do kill -TERM "$pid" 2>/dev/null; done
}
trap told=1 INT TERM # while there may be one that is not yet known

rank=0
while [ "$rank" -lt "$n" ] && [ -z "$told" ]; do
    "${PYTHON:-python3}" train.py "$@" -pn "$n" -pr "$rank" -ps "127.0.0.1:${PORT:-12345}" &
    pids="$pids $!"
    rank=$((rank + 1))
done
trap tell INT TERM
[ -z "$told" ] || kill -TERM $$

status=0
for pid in $pids; do
    while wait "$pid"; kill -0 "$pid" 2>/dev/null; do :; done # `wait` returns whenever a signal comes
    wait "$pid"
    ended=$?
    [ "$ended" = 0 ] || { [ "$status" != 0 ] && [ "$status" != 75 ]; } || status=$ended
done
exit "$status"
