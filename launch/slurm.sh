#!/usr/bin/env bash
# A run under Slurm, one process for each GPU, requeued until it is done.
#
#   sbatch --nodes=4 launch/slurm.sh --config=configs/finetune.py:B/16,cifar10 \
#     --config.init_from=/shared/ViT-B_16.npz --workdir=/shared/runs/NAME
#
# The workdir must lie on a disk that all nodes share, or in a bucket. JAX reads
# from Slurm's variables who the processes are, and gives each the GPU of its
# number on the node; so there are as many tasks on a node as it has GPUs.
#SBATCH --job-name=vit_jax
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=vit_jax-%j.log
# SIGTERM to the processes (not to this script) before the time is up: all save
# the same step and end with 143.
#SBATCH --signal=TERM@300
set -uo pipefail
# Slurm runs a copy of this script, from where `sbatch` was typed.
cd "${SLURM_SUBMIT_DIR:?start it with sbatch, from the checkout}" || exit 1
source launch/env.sh

srun --kill-on-bad-exit=1 --label "${PYTHON:-.venv/bin/python}" \
  -m vit_jax.main "$@"
status=$?
case "$status" in
  0 | 2 | 3)  # Done, refused, diverged: another start would end the same way.
    exit "$status"
    ;;
esac
echo "Ended with status $status; back into the queue." >&2
scontrol requeue "$SLURM_JOB_ID"
