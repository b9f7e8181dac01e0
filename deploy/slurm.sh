#!/bin/bash
# A learner and eight collectors, a task each, that share a URL. Put in your bucket, environment and sizes, then:
#   sbatch deploy/slurm.sh
# A job that is requeued, and one that is submitted again, goes on where the run is.
#SBATCH --job-name=rlhf
#SBATCH --ntasks=9
#SBATCH --cpus-per-task=4
#SBATCH --mem-per-cpu=4G
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@300
set -u
run=s3://bucket/run # credentials come from the environment: sbatch passes yours on

again() { # until it ends by itself; 2 says that what was asked for is wrong
  until "$@"; do
    [ $? -ne 2 ] || return 2
    sleep 5
  done
}
export -f again

srun --ntasks=1 --exact bash -c 'again "$@"' - rlhf-pipeline learn long_running --run "$run" &
srun --ntasks=8 --exact bash -c 'again "$@"' - rlhf-pipeline collect long_running --run "$run" &
wait
