#!/usr/bin/env bash
# Pretraining, then SFT, on your own data. To resume after an interruption, run it again. Arguments are flags of both
# stages; --stop_after 11h ends the script after this time, and the same command continues.
#
#   PRETRAIN_DATA=data/pretrain.jsonl SFT_DATA=data/sft.jsonl bash scripts/run_pretrain_sft.sh
#   GPUS=2,3 HIDDEN_SIZE=768 USE_MOE=1 PRETRAIN_DATA=... SFT_DATA=... bash scripts/run_pretrain_sft.sh
#
# Settings (environment variables, with their defaults):
#   PRETRAIN_DATA, SFT_DATA                 training data: file, folder or glob
#   PRETRAIN_EVAL_DATA="" SFT_EVAL_DATA=""  held-out data
#   GPUS=""                                 e.g. 0,1: one process per GPU; empty: one process, on a GPU if there is one
#   NPROC                                   processes, if not the number of GPUS (CPU: NPROC=2)
#   HIDDEN_SIZE=512 LAYERS=8 USE_MOE=0      the model
#   SAVE_DIR, CHECKPOINT_DIR                where weights and the state to resume from go: out/ and checkpoints/ here
#   PRETRAIN_ARGS="" SFT_ARGS=""            any further flags of the stage, e.g. "--epochs 1 --batch_size 64"
set -euo pipefail
here="$PWD"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/environment.sh

for name in PRETRAIN_DATA SFT_DATA; do
    if [ -z "${!name:-}" ]; then
        echo "error: $name is not set; give the data file: $name=path bash scripts/run_pretrain_sft.sh" >&2
        exit 2
    fi
done
[ -z "${GPUS:-}" ] || export CUDA_VISIBLE_DEVICES="$GPUS"
gpu_count="$(tr ',' '\n' <<<"${GPUS:-}" | grep -c . || true)"
NPROC="${NPROC:-$gpu_count}"
launch=(python)
[ "$NPROC" -le 1 ] || launch=(torchrun --standalone --nproc_per_node "$NPROC")

shared=(
    --hidden_size "${HIDDEN_SIZE:-512}" --num_hidden_layers "${LAYERS:-8}" --use_moe "${USE_MOE:-0}"
    --save_dir "${SAVE_DIR:=$PWD/out}" --checkpoint_dir "${CHECKPOINT_DIR:=$PWD/checkpoints}" --from_resume 1
)
root="$PWD"
cd "$here" # paths are relative to the caller's folder
export TRAINING_SESSION_START="$(date +%s)" TRAINING_SESSION_STOPPED="$SAVE_DIR/.stopped" # for --stop_after
rm -f "$TRAINING_SESSION_STOPPED"
end_if_stopped() {
    [ -e "$TRAINING_SESSION_STOPPED" ] || return 0
    echo "not finished; the same command continues"
    exit 0
}

# A finished stage resumes at its end and trains nothing.
echo "== pretraining"
"${launch[@]}" "$root/trainer/train_pretrain.py" --data_path "$PRETRAIN_DATA" "${shared[@]}" \
    ${PRETRAIN_EVAL_DATA:+--eval_data_path "$PRETRAIN_EVAL_DATA"} ${PRETRAIN_ARGS:-} "$@"
end_if_stopped
echo "== supervised fine-tuning"
"${launch[@]}" "$root/trainer/train_full_sft.py" --data_path "$SFT_DATA" --from_weight pretrain "${shared[@]}" \
    ${SFT_EVAL_DATA:+--eval_data_path "$SFT_EVAL_DATA"} ${SFT_ARGS:-} "$@"
end_if_stopped
echo "chat with it: python $root/scripts/chat.py --weight full_sft --hidden_size ${HIDDEN_SIZE:-512}" \
    "--use_moe ${USE_MOE:-0} --save_dir $SAVE_DIR"
