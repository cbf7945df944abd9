#!/bin/bash
#SBATCH --job-name=demo
#SBATCH --nodes=5
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=2
#SBATCH --partition=gpu
#SBATCH --account=lab
#SBATCH --time=2-12:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --open-mode=append
#SBATCH --chdir="/"
#SBATCH --output="/shared/my runs/.slurm/demo/%j.out"
#SBATCH --error="/shared/my runs/.slurm/demo/%j.err"
#SBATCH --qos=high
#SBATCH --mem=0
# Run demo: its head on the first machine of this job, nodes on the others.
# Each machine has to see the directory of runs, and this Python at the same path.
runs='/shared/my runs'
run=$runs/demo
job=$runs/.slurm/demo
tianflow=(/opt/tianflow/bin/python -m tianflow)
head_options=(--nodes=1 --ntasks=1 --relative=0 --cpus-per-task=16)
node_options=(--nodes=4 --ntasks=4 --relative=1 --label --no-kill --kill-on-bad-exit=0 --cpus-per-task=16)
arguments=(--plain --runs-dir '/shared/my runs' --json run.name=demo placement.launcher=nodes)
export PYTHONUNBUFFERED=1

# A job that returned from the queue continues, or starts again if it has no checkpoint. The newest
# settings of the run count, with changes during the run.
start=("$job/config.toml")
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] && [ -e "$run" ]; then
  if compgen -G "$run/checkpoints/v*" >/dev/null; then
    start=(--resume "$run")
  else
    [ ! -f "$run/config.toml" ] || cp "$run/config.toml" "$job/config.toml"
    mv "$run" "$run.before-$SLURM_RESTART_COUNT"
  fi
fi

# A join file of an earlier head would lead nodes to a head that is gone.
rm -f "$run/join.toml"

# Slurm sends SIGTERM to the steps as well. This shell waits until the head has its checkpoint.
trap : TERM

# The address of the head is known inside its step only.
srun "${head_options[@]}" bash -c '
  head=$SLURM_LAUNCH_NODE_IPADDR
  exec "$@" http.host=$head "cluster.listen=tcp://$head:*"' head "${tianflow[@]}" train "${start[@]}" "${arguments[@]}" &
head=$!

# Standard output is that of the head alone.
(
  srun "${node_options[@]}" bash -c '
    runs=$1 join=$2
    shift 2
    if [ ! -d "$runs" ]; then
      echo "tianflow: slurm: $SLURMD_NODENAME does not see $runs; choose a --runs-dir on a file" \
        "system that all machines of the job see" >&2
      exit 2
    fi
    exec "$@" node "$join" --once --in-job --name "$SLURMD_NODENAME"' \
    node "$job" "$run/join.toml" "${tianflow[@]}" >&2
  code=$?
  # Every node was refused, so the head would wait for ever.
  [ "$code" -ne 2 ] || kill -TERM "$head"
  exit "$code"
) &
nodes=$!

until wait "$head"; code=$?; ! kill -0 "$head" 2>/dev/null; do :; done
if ! kill -0 "$nodes" 2>/dev/null; then
  wait "$nodes"
  [ $? -ne 2 ] || exit 2
fi

# SIGTERM ended the head, and the job was not cancelled: it is preempted, or its time is over.
if [ "$code" -eq 143 ] && [ "$(squeue -h -j "$SLURM_JOB_ID" -o %T)" = RUNNING ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
