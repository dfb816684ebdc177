#!/bin/bash
# Train on all GPUs of a Slurm job, from a directory that its nodes share: sbatch examples/cluster/slurm.sh
# Submit it again to continue from the last checkpoint.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@600
# ^ ten minutes before the time limit the run saves a checkpoint and ends

config=${CONFIG:-examples/native/frozenlake.yaml}
name=${NAME:-slurm}
port=${PORT:-6379}

set -euo pipefail
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')  # of this job alone
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=300

trap 'quintet stop "$name" --timeout 540' TERM
srun --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" \
    ray symmetric-run --address "$first:$port" --min-nodes "$SLURM_NNODES" -- \
    quintet train "$config" name="$name" placement.nodes="$SLURM_NNODES" \
    placement.devices_per_node="$SLURM_GPUS_ON_NODE" --ray "$first:$port" &
launch=$!
while true; do
    wait "$launch" && status=0 || status=$?
    kill -0 "$launch" 2>/dev/null || break  # else the signal has interrupted `wait`
done
exit "$status"
