"""Run an epoch of SFT and record each update's gradient, loss and sample ids (started by test_loop.py
with arguments DATA CACHE OUT BATCH_SIZE ACCUMULATION USE_MOE PACKING)."""

import sys
from contextlib import nullcontext

import torch

from common.settings import ROOT, StageArgs
from dataset.lm_dataset import SFTDataset
from dataset.token_cache import load_tokenizer
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from trainer import trainer_utils as utils
from trainer.data.order import epoch_loader, steps_per_epoch
from trainer.devices.process_group import leave_process_group, this_rank
from trainer.devices.wrapping import unwrap, wrap_model
from trainer.loop import make_record, train_update, update_size
from trainer.objectives.next_token import next_token_loss
from trainer.run.state import TrainState


def main() -> None:
    data, cache, out, batch_size, accumulation, use_moe, packing = sys.argv[1:]
    batch_size, accumulation = int(batch_size), int(accumulation)
    tokenizer = load_tokenizer(ROOT / "model")
    dataset = SFTDataset(data, tokenizer, max_length=64, packing=packing == "1", cache_dir=cache)
    utils.init_distributed_mode()
    utils.setup_seed(0)
    config = MiniMindConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, use_moe=use_moe == "1"
    )
    config.num_key_value_heads = 2
    model = MiniMindForCausalLM(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # the same weights for every update compared
    args = StageArgs(seed=0, grad_clip=0.0, accumulation_steps=accumulation, batch_size=batch_size, epochs=1)
    state = TrainState(
        args=args, lm_config=config, model=wrap_model(model, torch.device("cpu")), optimizer=optimizer,
        scaler=torch.amp.GradScaler("cpu", enabled=False), autocast=nullcontext(), device=torch.device("cpu"),
        loss_fn=next_token_loss, schedule=lambda update, total, args: 0.0,
        run={"samples": len(dataset), "global_batch": 1, "epochs": 1},
    )  # fmt: skip
    gradients, records, ids = [], [], []
    flat = lambda *_: gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]).clone())  # noqa: E731
    optimizer.register_step_pre_hook(flat)
    loader = epoch_loader(dataset, batch_size, seed=7, epoch=1)
    batches, iters = list(loader), steps_per_epoch(len(dataset), batch_size)
    assert len(batches) == iters
    state.iters = iters
    for begin in range(0, iters, accumulation):
        window = batches[begin : begin + accumulation]
        targets, tokens, _ = update_size(state, [state.size_fn(batch, state.lm_config) for batch in window])
        means, norm = train_update(state, window, targets, tokens)
        records.append(make_record(state, means, norm, False))
        ids.append(torch.cat([batch["sample_ids"] for batch in window]).tolist())
    rank = this_rank()
    state.model = unwrap(state.model)
    leave_process_group()
    torch.save({"gradients": gradients, "records": records, "ids": ids}, f"{out}.{rank}")
