#!/bin/bash
# One GPU under SLURM, for as many turns as the run needs: sbatch docs/launch/slurm.sh, from the repository.
# Set the flags of train.py below, and partition, account and times as the cluster has them.
#
# Two minutes before its time is over the job hears it: train.py ends the step at hand, saves and leaves with status 130,
# and the job goes back into the queue. After a crash it does too, and after the loss of a machine SLURM puts it there.
# Not so when the run is complete (0), when a flag or a file cannot be used (2), when the run diverged (3), and after
# scancel, whose SIGTERM saves as well. A job that is pre-empted gets that one, and is put back by SLURM.

#SBATCH --job-name=llmc-jax
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=64G
#SBATCH --time=08:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
#SBATCH --signal=B:USR1@120

out=${OUT:-runs/124M} # on a file system that every machine of the partition sees
flags=(-e d12 -i "dev/data/fineweb10B/fineweb_train_*.bin" -j "dev/data/fineweb10B/fineweb_val_*.bin" -b 64 -d 524288
       -x 18865 -n 500 -nk 3)
turns=${TURNS:-50} # a run that crashes at once each time ends after so many

told= again= training=
tell() { # once: a second signal would end train.py before it has saved
    [ "$told" ] || [ -z "$training" ] || kill -TERM "$training"
    told=1
}
# B: sends the signal to this shell alone, which hands it on as the one that train.py knows.
trap 'again=1; tell' USR1
trap tell TERM INT
"${PYTHON:-python3}" train.py "${flags[@]}" "$@" -o "$out" -y 1 &
training=$!
[ -z "$told" ] || kill -TERM "$training" # one came before there was anybody to tell
while wait "$training"; kill -0 "$training" 2>/dev/null; do :; done # `wait` returns whenever a signal comes
wait "$training"
status=$?

case $status in
    0) echo "slurm.sh: the run is complete" && exit 0 ;;
    2 | 3) echo "slurm.sh: train.py ended with status $status, which another turn would not change" >&2 && exit $status ;;
    130) [ "$again" ] || exit $status ;;
esac
if [ "${SLURM_RESTART_COUNT:-0}" -ge "$turns" ]; then
    echo "slurm.sh: that was turn $turns; it ended with status $status" >&2
else
    echo "slurm.sh: train.py ended with status $status; back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
