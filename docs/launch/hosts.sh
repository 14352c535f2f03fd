#!/bin/bash
# Starts one process of a run on each host of a file, over ssh, and waits for all. Start it from the repository, which
# every host has at the same path, with its .venv.
#
#     HOSTS=hosts.txt docs/launch/hosts.sh -e d12 -i "data/train_*.bin" -j "data/val_*.bin" -b 32 -o runs/124M -n 500 -y 1
#
#   HOSTS    the file: a host on each line, process 0's first; what follows it there is not read (--devices N takes N GPUs)
#   PORT     at which process 0 waits for the others there (default 12345)
#   PYTHON   the interpreter there (default .venv/bin/python)
#   SSH      the program that starts a command on a host: SSH HOST COMMAND (default ssh -tt)
#   PASS     the variables of the environment that go along (default NCCL_DEBUG NCCL_SOCKET_IFNAME NCCL_IB_HCA XLA_FLAGS)
#
# Everything else is train.py's flags. Ctrl-C ends the connections. -tt turns that into a SIGHUP there, and train.py stops
# after the step at hand and saves. The status is that of the process that failed, where one did.

hosts=${HOSTS:?"set HOSTS to the file of hosts"}
mapfile -t names < <(sed -e 's/#.*//' -e 's/^[[:space:]]*//' -e 's/[[:space:]].*//' -e '/^$/d' "$hosts")

variables=
for name in ${PASS:-NCCL_DEBUG NCCL_SOCKET_IFNAME NCCL_IB_HCA XLA_FLAGS}; do
    [ -z "${!name+set}" ] || variables+=" $name=$(printf %q "${!name}")"
done
pids=() told=
trap told=1 INT TERM # while there may be one that is not yet known
for rank in "${!names[@]}"; do
    [ -z "$told" ] || break
    words=$(printf ' %q' "${PYTHON:-.venv/bin/python}" train.py "$@" -pn ${#names[@]} -pr "$rank" \
        -ps "${names[0]}${PORT:+:$PORT}")
    ${SSH:-ssh -tt} "${names[rank]}" "cd $(printf %q "$PWD") && exec env$variables$words" </dev/null &
    pids+=($!)
done
tell() { # once: a second signal would end train.py before it has saved
    trap : INT TERM
    sleep 1 # a process that has just been started would not hear it
    kill -TERM "${pids[@]}"
}
trap tell INT TERM
[ -z "$told" ] || kill -TERM $$

status=0
for pid in "${pids[@]}"; do
    while wait "$pid"; kill -0 "$pid" 2>/dev/null; do :; done # `wait` returns whenever a signal comes
    wait "$pid"
    ended=$?
    [ $ended = 0 ] || { [ $status != 0 ] && [ $status != 75 ]; } || status=$ended
done
exit $status
