"""Pretraining: a model with random weights learns to predict the next token of raw text.

    python train_pretrain.py --data_path ../dataset/pretrain.jsonl                               a CPU, a Mac or one GPU
    CUDA_VISIBLE_DEVICES=2,3 torchrun --nproc_per_node 2 train_pretrain.py --data_path ...       two GPUs
    torchrun --nnodes 2 --nproc_per_node 8 --node_rank N --master_addr HOST \\
        train_pretrain.py --data_path ...                                                        on each of two machines

Reads records {"text": ...}. Every token of a document is a target; a document longer than --max_seq_len becomes
several samples, nothing is cut away. Writes out/pretrain_<hidden_size>[_moe].pth, which train_full_sft.py starts from.
The run itself is nine numbered steps in stage.py, its loop is loop.py. The defaults below are MiniMind's; on a corpus
of some megabytes --accumulation_steps 1 learns far more, since it makes eight times as many updates.
"""

from dataset.lm_dataset import PretrainDataset
from trainer.stage import run_stage
from trainer.state import next_token_loss

PRETRAIN = {
    "save_weight": "pretrain",
    "from_weight": "none",
    "epochs": 2,
    "batch_size": 32,
    "accumulation_steps": 8,
    "learning_rate": 5e-4,
    "max_seq_len": 340,
}


if __name__ == "__main__":
    run_stage(__doc__, PRETRAIN, PretrainDataset, next_token_loss)
