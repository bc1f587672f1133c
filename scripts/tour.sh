#!/usr/bin/env bash
# What comes after SFT, in 10 to 20 minutes on two CPU cores: with the quickstart's model a persona by LoRA, a terse style
# by DPO, a model of a third of the size by distillation; then sums by GRPO, and an agent with a calculator. Each is
# examined before and after.
#
#   bash scripts/tour.sh            goes on where an earlier tour stopped
#   bash scripts/tour.sh --fresh    starts over
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case "${1:-}" in
    "" | --fresh) ;;
    *)
        echo "error: unknown argument $1; there is only --fresh, which starts over" >&2
        exit 2
        ;;
esac
model=out/demo/full_sft_256.pth
if [ ! -f "$model" ]; then
    echo "error: $model, the quickstart's model, is missing; make it with: bash scripts/quickstart.sh" >&2
    exit 2
fi
source scripts/environment.sh

[ "${1:-}" != --fresh ] || rm -rf out/tour checkpoints/tour
trap 'echo "The tour stopped. It goes on with: bash scripts/tour.sh" >&2' ERR
python -m dataset.demo_corpus --output_dir dataset/demo
python -m dataset.demo_tour --output_dir dataset/demo
python -m dataset.demo_sums --output_dir dataset/demo/sums
python scripts/tour.py
cat <<END

Try next$([ -x .venv/bin/python ] && echo " (in this shell first: source .venv/bin/activate)"):
  python scripts/chat.py --model $model --lora out/tour/persona_256     ask it who it is
  python scripts/chat.py --save_dir out/tour --weight terse             the terse one
  python scripts/chat.py --save_dir out/tour --weight student           the small one
END
