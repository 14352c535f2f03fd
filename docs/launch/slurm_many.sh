#!/bin/bash
# A run on several nodes under SLURM, for as many turns as it needs: sbatch docs/launch/slurm_many.sh, from the repository.
# Set the flags of train.py below, and partition, account, numbers and times as the cluster has them.
#
# Here one task on each node takes all of its GPUs. For one task per GPU: --ntasks-per-node=8, and cpus and memory divided.
# The tasks of a node then share the GPUs that they see; --gpus-per-task=1 works too.
#
# Two minutes before its time is over the script hears it and has SIGTERM sent to the tasks. They agree on a step, save,
# and end with status 130, and the job goes back into the queue. After a crash (75 and the like) it does too, and after the
# loss of a node SLURM puts it there. Not so when the run is complete (0), when a flag or a file cannot be used (2), when
# the run diverged (3), and after scancel, whose SIGTERM the tasks get from SLURM itself.

#SBATCH --job-name=llmc-jax
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0
#SBATCH --time=08:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
#SBATCH --signal=B:USR1@120

out=${OUT:-runs/124M} # on a file system that all nodes see
flags=(-e d12 -i "dev/data/fineweb10B/fineweb_train_*.bin" -j "dev/data/fineweb10B/fineweb_val_*.bin" -b 32 -d 524288
       -x 18865 -n 500 -nk 3)
turns=${TURNS:-50} # a run that crashes at once each time ends after so many

# srun takes this from sbatch only if told so (since SLURM 22.05).
[ -z "$SLURM_CPUS_PER_TASK" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
again=
# Not to srun itself, which would kill the tasks at once; and once, since a second signal ends train.py before it has saved.
trap 'trap : USR1; again=1; scancel --signal=TERM "$SLURM_JOB_ID.0"' USR1
trap : TERM INT # the tasks are told without this script
srun --kill-on-bad-exit=0 "${PYTHON:-python3}" train.py "${flags[@]}" "$@" -o "$out" -y 1 &
training=$!
while wait "$training"; kill -0 "$training" 2>/dev/null; do :; done # `wait` returns whenever a signal comes
wait "$training"
status=$? # the highest of the tasks'

case $status in
    0) echo "slurm_many.sh: the run is complete" && exit 0 ;;
    2 | 3) echo "slurm_many.sh: train.py ended with status $status, which another turn would not change" >&2 && exit $status ;;
    130) [ "$again" ] || exit $status ;;
esac
if [ "${SLURM_RESTART_COUNT:-0}" -ge "$turns" ]; then
    echo "slurm_many.sh: that was turn $turns; it ended with status $status" >&2
else
    echo "slurm_many.sh: train.py ended with status $status; back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
