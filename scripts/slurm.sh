#!/usr/bin/env bash
# One training run on several nodes of a SLURM cluster. Edit the settings and the last lines, then: sbatch scripts/slurm.sh
# Arguments are flags of the training. Repository, data, --cache_dir, --save_dir and --checkpoint_dir must lie on a file
# system that all nodes share.
#SBATCH --job-name=minimind
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
source .venv/bin/activate

DATA="${DATA:-data/pretrain.jsonl}"
CACHE="${CACHE:-dataset/cache}"
RANKS_PER_NODE="${RANKS_PER_NODE:-8}"
LOGS="${LOGS:-out/logs/$SLURM_JOB_ID}" # what each rank prints: node_<n>/.../attempt_<n>/<local rank>/stdout.log, stderr.log
export DATA CACHE RANKS_PER_NODE LOGS MASTER_ADDR MASTER_PORT="${MASTER_PORT:-29500}"
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# export GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME=ib0 # the network that connects the nodes, if they have several
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}" # since SLURM 22.05 srun does not take --cpus-per-task from sbatch
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=110 # seconds that torchrun gives the ranks to save after a signal
ulimit -n "$(ulimit -Hn)" # the first launcher holds a connection to each rank

# MARGIN seconds before the time limit the ranks save and end (--stop_after), and the job is queued again. An update with
# its evaluation, and saving, must fit into the margin.
MARGIN="${MARGIN:-120}"
mkdir -p "$LOGS"
export TRAINING_SESSION_START="$(date +%s)" TRAINING_SESSION_STOPPED="$LOGS/stopped"
rm -f "$TRAINING_SESSION_STOPPED"
end="$(date --date "$(SLURM_TIME_FORMAT=standard squeue --noheader --job "$SLURM_JOB_ID" --format %e)" +%s)" # of the job
export STOP_AFTER="$((end - TRAINING_SESSION_START - MARGIN))s"

# Tokenise once, on the first node, with the flags of the training that decide about the token cache.
tokenising=(--data_path "$DATA" --cache_dir "$CACHE")
flags=("$@")
for ((i = 0; i < $#; i++)); do
    case "${flags[i]%%=*}" in
        --data_path | --cache_dir | --max_seq_len | --tokenizer_path | --eval_share | --text_separator | --on_bad_data | --max_bad_share)
            tokenising+=("${flags[i]}")
            [[ ${flags[i]} == *=* ]] || tokenising+=("${flags[++i]-}")
            ;;
    esac
done
python -m dataset.show_samples --samples 0 --kind pretrain "${tokenising[@]}"

# Each node starts its own launcher, which starts the ranks again, twice at most, when one fails; from the last checkpoint.
srun --kill-on-bad-exit=1 bash -c 'exec torchrun --nnodes "$SLURM_NNODES" --node_rank "$SLURM_NODEID" \
    --nproc_per_node "$RANKS_PER_NODE" --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" --max_restarts 2 \
    --log_dir "$LOGS/node_$SLURM_NODEID" --redirects 3 --tee 0:3 \
    trainer/train_pretrain.py --data_path "$DATA" --cache_dir "$CACHE" --stop_after "$STOP_AFTER" \
    --from_resume 1 "$@"' torchrun "$@"
[ ! -e "$TRAINING_SESSION_STOPPED" ] || scontrol requeue "$SLURM_JOB_ID"
