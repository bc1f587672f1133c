#!/usr/bin/env bash
# The first command: from generated text to a model that answers questions, in a few minutes on two CPU cores.
#
#   bash scripts/quickstart.sh            reuses the results of an earlier run
#   bash scripts/quickstart.sh --fresh    starts over
#
# Two models are fine-tuned on the same conversations: one that was pretrained and one that was not. Both are evaluated
# on questions about people whom the conversations never mention, so only facts from pretraining can help.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case "${1:-}" in
    "" | --fresh) ;;
    *)
        echo "error: unknown argument $1; there is only --fresh, which starts over" >&2
        exit 2
        ;;
esac
source tools/environment.sh

weights=out/demo checkpoints=checkpoints/demo
[ "${1:-}" != --fresh ] || rm -rf "$weights" "$checkpoints" dataset/demo out/tour checkpoints/tour

run=(--hidden_size 256 --num_hidden_layers 3 --max_seq_len 256 --accumulation_steps 1 --log_interval 100 --save_interval 500)
run+=(--save_dir "$weights" --checkpoint_dir "$checkpoints" --from_resume "$([ -d "$checkpoints" ] && echo 1 || echo 0)")
trap 'echo "The demo stopped. It continues with: bash scripts/quickstart.sh (--fresh starts over)" >&2' ERR
sft=(--data_path dataset/demo/sft.jsonl --eval_data_path dataset/demo/sft_eval.jsonl)
sft+=(--epochs 5 --batch_size 8 --learning_rate 3e-4)

echo "== 1/5 a small invented world, in Chinese and English"
python -m scripts.demo.corpus --output_dir dataset/demo
echo "== 2/5 pretraining: what the world is like"
python trainer/train_pretrain.py --data_path dataset/demo/pretrain.jsonl \
    --eval_data_path dataset/demo/pretrain_eval.jsonl --epochs 3 --batch_size 8 --learning_rate 2.5e-4 \
    --warmup_updates 20 "${run[@]}"
echo "== 3/5 fine-tuning: how to answer, shown with some of its people"
python trainer/train_full_sft.py --from_weight pretrain "${sft[@]}" "${run[@]}"
echo "== 4/5 the same fine-tuning without pretraining, to compare"
python trainer/train_full_sft.py --from_weight none --save_weight sft_only "${sft[@]}" "${run[@]}"
echo '{"temperature": 0.1}' >"$weights/generation_config.json" # so small a model strays at the usual 0.7, and at 0.3
echo "== 5/5 the quiz: people whom fine-tuning never mentioned, each question alone, then after one about somebody else"
quiz=(python scripts/evaluate.py --task answers --model "$weights/full_sft_256.pth" --reward contains_answer --max_new_tokens 32)
"${quiz[@]}" --data_path dataset/demo/quiz.jsonl --against "$weights/sft_only_256.pth" --show 6 --json "$weights/quiz.json"
"${quiz[@]}" --data_path dataset/demo/quiz_second.jsonl --json "$weights/quiz_second.json"
python scripts/plot_metrics.py "$weights" --png "$weights/curves.png"
cat <<END

Try next$activate_first:
  python scripts/chat.py --save_dir $weights     chat with it
  pip install -r requirements-serve.txt; python scripts/serve_openai_api.py --save_dir $weights     the same in a browser, with the curves: http://127.0.0.1:8000
  python scripts/convert_model.py --model $weights --to page     the model and a chat in one HTML file, to send
  python -m dataset.show_samples --kind sft --data_path dataset/demo/sft.jsonl --samples 1     see what SFT trains on
  python scripts/plan.py --hours 0.2 --pretrain_data FILE     your own text: docs/quickstart.md#my-own-text
END
