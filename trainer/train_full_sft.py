"""Supervised fine-tuning: a pretrained model learns to answer in chat, all its weights in motion.

    python train_full_sft.py --data_path ../dataset/sft.jsonl                                    a CPU, a Mac or one GPU
    CUDA_VISIBLE_DEVICES=2,3 torchrun --nproc_per_node 2 train_full_sft.py --data_path ...       two GPUs
    torchrun --nnodes 2 --node_rank N --master_addr HOST --nproc_per_node 8 train_full_sft.py ...  2 hosts
    python train_full_sft.py --data_path ... --from_resume 1                                     after an interruption

Reads conversations ({"conversations": [{"role", "content"}, ...]} and the forms in README.md). Only what the assistant
says is a target, in every turn, with its end-of-turn token; the chat template marks it. Starts from
out/pretrain_<hidden_size>[_moe].pth (--from_weight pretrain), writes out/full_sft_<hidden_size>[_moe].pth for chat.py.
Open stage.py for the nine steps of the run, loop.py for its loop. The defaults below are MiniMind's, whose small
learning rate suits weights that have seen billions of tokens; after a short pretraining 1e-4 to 1e-3 learns faster.
"""

from dataset.lm_dataset import SFTDataset
from trainer.stage import run_stage
from trainer.state import next_token_loss

FULL_SFT = {
    "save_weight": "full_sft",
    "from_weight": "pretrain",
    "epochs": 2,
    "batch_size": 16,
    "learning_rate": 1e-5,
    "max_seq_len": 768,
}


if __name__ == "__main__":
    run_stage(__doc__, FULL_SFT, SFTDataset, next_token_loss)
