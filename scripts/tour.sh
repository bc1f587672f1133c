#!/usr/bin/env bash
# What comes after SFT, in 10 to 20 minutes on two CPU cores: with the quickstart's model a persona by LoRA, a terse style
# by DPO, a model of a third of the size by distillation; then sums by GRPO, and an agent with a calculator. Each is
# asked the questions of a quiz beside the model before.
#
#   bash scripts/tour.sh            goes on where an earlier tour stopped: finished runs are not repeated
#   bash scripts/tour.sh --fresh    starts over
set -Eeuo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case "${1:-}" in
    "" | --fresh) ;;
    *)
        echo "error: unknown argument $1; there is only --fresh, which starts over" >&2
        exit 2
        ;;
esac
model=out/demo/full_sft_256.pth data=dataset/demo
if [ ! -f "$model" ]; then
    echo "error: $model, the quickstart's model, is missing; make it with: bash scripts/quickstart.sh" >&2
    exit 2
fi
source tools/environment.sh

[ "${1:-}" != --fresh ] || rm -rf out/tour checkpoints/tour
trap 'echo "The tour stopped. It continues with: bash scripts/tour.sh" >&2' ERR
python -m scripts.demo.corpus --output_dir "$data"

# Show a command and run it.
run() {
    printf '\n$ %s\n' "$*"
    "$@"
}
train() { # STAGE NAME DATA FLAGS...: run a stage on a file of the data, or let it go on
    run python "trainer/train_$1.py" --save_weight "$2" --data_path "$data/$3" --save_dir out/tour \
        --checkpoint_dir checkpoints/tour --from_resume 1 --accumulation_steps 1 --save_interval 100 "${@:4}"
}
quiz() { # FILE FLAGS...: ask models the questions of a file
    run python scripts/evaluate.py --task answers --data_path "$data/$1" --reward contains_answer --max_new_tokens 64 "${@:2}"
}

echo "== 1/5 persona: LoRA, another name for the assistant; the model stays as it is"
train lora persona persona.jsonl --from_weight "$model" --max_seq_len 256 --epochs 5 --batch_size 8 --log_interval 50
for questions in persona_quiz.jsonl quiz.jsonl; do
    quiz "$questions" --model "$model" --lora out/tour/persona_256 --against "$model"
done

echo "== 2/5 terse: DPO, answers that do not repeat the name of whom was asked for"
# without the term of --rpo_alpha DPO costs some models a tenth of the quiz
train dpo terse terse.jsonl --from_weight "$model" --eval_data_path "$data/terse_eval.jsonl" --max_seq_len 128 \
    --epochs 2 --batch_size 8 --learning_rate 3e-5 --rpo_alpha 5 --log_interval 50
quiz quiz.jsonl --model "$model" --against out/tour/terse_256.pth

echo "== 3/5 distillation: a third of the size, from answers with mistakes; alone, and with the teacher"
for each in alone=1 student=0.1; do # the share of the cross entropy in the loss
    train distillation "${each%=*}" distillation.jsonl --alpha "${each#*=}" --from_weight none --hidden_size 128 \
        --num_hidden_layers 3 --from_teacher_weight "$model" --eval_data_path "$data/distillation_eval.jsonl" \
        --max_seq_len 128 --learning_rate 2e-3 --batch_size 16 --epochs 4 --log_interval 50
done
quiz quiz.jsonl --model out/tour/alone_128.pth --against out/tour/student_128.pth

echo "== 4/5 sums: GRPO, sums of one and two digits, from half known to known, by rewards for right answers"
train full_sft sums sums/sft.jsonl --from_weight none --hidden_size 256 --num_hidden_layers 3 --max_seq_len 64 \
    --epochs 2 --batch_size 112 --warmup_updates 20 --optimizer muon --learning_rate 5e-4 --log_interval 50
train grpo sums_grpo sums/rl.jsonl --from_weight out/tour/sums_256.pth --eval_data_path "$data/sums/test.jsonl" \
    --max_seq_len 64 --max_gen_len 6 --epochs 2 --warmup_updates 5 --learning_rate 1e-4 --eval_interval 40 --log_interval 20

echo "== 5/5 calculator: an agent, sums of three digits with a tool"
train full_sft calls sums/agent_sft.jsonl --from_weight out/tour/sums_256.pth --max_seq_len 256 --epochs 1 \
    --warmup_updates 5 --optimizer muon --learning_rate 5e-4 --log_interval 50
train agent calculator sums/agent_rl.jsonl --from_weight out/tour/calls_256.pth --max_seq_len 256 --max_gen_len 40 \
    --environment calculator --reward numeric_answer,tool_used=0.2 --learning_rate 1e-4 --warmup_updates 5 \
    --eval_data_path "$data/sums/agent_test.jsonl" --log_interval 1 --eval_interval 10
cat <<END

Try next$activate_first:
  python scripts/chat.py --model $model --lora out/tour/persona_256     ask it who it is
  python scripts/chat.py --save_dir out/tour --weight terse             the terse one
  python scripts/chat.py --save_dir out/tour --weight student           the small one
END
