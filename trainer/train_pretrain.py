"""Pretraining: a model with random weights learns to predict the next token of raw text.

    python train_pretrain.py --data_path ../dataset/pretrain.jsonl                               a CPU, a Mac or one GPU
    CUDA_VISIBLE_DEVICES=2,3 torchrun --nproc_per_node 2 train_pretrain.py --data_path ...       two GPUs
    torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint HOST:29500 \\
        train_pretrain.py --data_path ...                                                        on each of two machines

Reads records {"text": ...}. Every token of a document is a target; a document longer than --max_seq_len becomes
several samples, nothing is cut away. Writes out/pretrain_<hidden_size>[_moe].pth, which train_full_sft.py starts from.
The run itself is nine numbered steps in stage.py, its loop is loop.py.
"""

from dataset.errors import run_main
from dataset.lm_dataset import PretrainDataset
from trainer.arguments import stage_parser
from trainer.loop import next_token_loss
from trainer.stage import train_stage

DEFAULTS = {
    "save_weight": "pretrain",
    "from_weight": "none",
    "epochs": 2,
    "batch_size": 32,
    "accumulation_steps": 8,
    "learning_rate": 5e-4,
    "max_seq_len": 340,
}


def main() -> None:
    """Parse the command line and run the stage."""
    args = stage_parser(__doc__, **DEFAULTS).parse_args()
    train_stage(args, PretrainDataset, next_token_loss)


if __name__ == "__main__":
    run_main(main)
