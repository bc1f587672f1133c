#!/usr/bin/env bash
# One training run on several nodes of a SLURM cluster. Edit the settings and the last line, then: sbatch scripts/slurm.sh
# Repository, data, --cache_dir, --save_dir and --checkpoint_dir must lie on a file system that all nodes share.
#SBATCH --job-name=minimind
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
source .venv/bin/activate

DATA="${DATA:-data/pretrain.jsonl}"
RANKS_PER_NODE="${RANKS_PER_NODE:-8}"
export MASTER_ADDR MASTER_PORT="${MASTER_PORT:-29500}" DATA RANKS_PER_NODE
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# Tokenise once, on the first node, with the settings of the training.
python -m dataset.show_samples --samples 0 --kind pretrain --data_path "$DATA" --max_seq_len 340

# Each node starts its own launcher. --from_resume 1: a requeued job resumes from its last checkpoint.
srun --kill-on-bad-exit=1 bash -c 'torchrun --nnodes "$SLURM_NNODES" --node_rank "$SLURM_NODEID" \
    --nproc_per_node "$RANKS_PER_NODE" --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" \
    trainer/train_pretrain.py --data_path "$DATA" --from_resume 1'
