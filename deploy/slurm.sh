#!/bin/bash
# A learner and eight collectors, a task each, that share a URL. Put in your bucket, environment and sizes, then:
#   sbatch deploy/slurm.sh
# Five minutes before its time limit the job asks all of them to save, and is requeued; it goes on where the run is.
#SBATCH --job-name=rlhf
#SBATCH --ntasks=9
#SBATCH --cpus-per-task=4
#SBATCH --mem-per-cpu=4G
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@300
set -u
run=s3://bucket/run # credentials come from the environment: sbatch passes yours on

again() { # until it ends by itself; 2 says that what was asked for is wrong. TERM reaches every process of a task
  local stopping=""
  trap 'stopping=1' TERM
  while true; do
    "$@" &
    local child=$! code=0
    wait "$child" || code=$?
    while kill -0 "$child" 2> /dev/null; do # a signal ends `wait`, and the command still saves
      code=0
      wait "$child" || code=$?
    done
    if [ -n "$stopping" ] || [ "$code" -eq 0 ] || [ "$code" -eq 2 ]; then return "$code"; fi
    sleep 5
  done
}
export -f again

limit=""
trap 'limit=1; scancel --signal=TERM "$SLURM_JOB_ID"' USR1 # to the processes of all steps, not to this script
srun --ntasks=1 --exact bash -c 'again "$@"' - rlhf-pipeline learn long_running --run "$run" &
srun --ntasks=8 --exact bash -c 'again "$@"' - rlhf-pipeline collect long_running --run "$run" &
while [ -n "$(jobs -rp)" ]; do wait; done
[ -z "$limit" ] || scontrol requeue "$SLURM_JOB_ID"
