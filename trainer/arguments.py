"""The command line that all stage scripts share: MiniMind's flags, grouped, each with its unit and default."""

import argparse
import math
import os
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from dataset.errors import Parser, UserError
from model.model_minimind import MiniMindConfig
from trainer.optim import MUON_RATE, OPTIMIZERS
from trainer.tracker import MODES
from trainer.trainer_utils import ROOT, native_float16, pick_device

NAMES = ("save_weight", "from_weight")


def model_shape_flags(parser: argparse._ActionsContainer) -> None:
    """The flags that say which model it is; every script that builds one takes them."""
    flag = parser.add_argument
    flag("--hidden_size", type=int, default=512, help="width, divisible by 16")
    flag("--num_hidden_layers", type=int, default=8, help="depth, in layers")
    flag("--use_moe", type=int, choices=[0, 1], default=0, help="1: mixture of experts instead of dense")


def trained_model_flags(parser: argparse._ActionsContainer) -> None:
    """The flags that name trained weights and where to run them; every script that uses a model takes them."""
    flag = parser.add_argument
    flag("--weight", default="full_sft", help="name of the weights in --save_dir")
    model_shape_flags(parser)
    flag("--save_dir", default=str(ROOT / "out"), help="folder of the weights")
    flag("--tokenizer_path", default=str(ROOT / "model"), help="folder of the tokenizer they were trained with")
    flag("--device", default="auto", help="auto, cuda, mps or cpu")


def machine_flags(parser: argparse._ActionsContainer) -> None:
    """The flags that say where and how a stage computes."""
    flag = parser.add_argument
    flag("--device", default="auto", help="auto, cuda, cuda:N, mps or cpu")
    flag(
        "--dtype",
        choices=["auto", "bfloat16", "float16", "float32"],
        default="auto",
        help="autocast; weights stay float32",
    )
    flag("--num_workers", type=int, default=0, help="loader processes per rank")
    flag("--use_compile", type=int, choices=[0, 1], default=0, help="1: torch.compile")
    flag(
        "--parallel", choices=["ddp", "fsdp"], default="ddp", help="several ranks: a copy of the model each, or shards"
    )
    flag("--activation_checkpointing", type=int, choices=[0, 1], default=0, help="1: less memory, a third more work")
    flag("--rank_timeout", type=int, default=600, help="seconds without a sign of another rank until it counts as lost")


def stage_parser(description: str, **defaults) -> Parser:
    """The parser of a stage script. `defaults` are what the stage owns (`save_weight`, `epochs` ...)."""
    parser = Parser(description=description.split("\n", 1)[0])
    flag = parser.add_argument_group("files").add_argument
    flag(
        "--data_path",
        required=True,
        help="training data: file, folder or glob, several with commas (.jsonl .gz .parquet)",
    )
    flag("--eval_data_path", help="held-out data, the same forms; gives eval_loss, eval_bpb and <save_weight>_best")
    flag("--from_weight", help="stage whose weights in --save_dir to start from; 'none' for random weights")
    flag("--from_resume", type=int, choices=[0, 1], default=0, help="1: go on from the checkpoint, if there is one")
    flag("--save_dir", default=str(ROOT / "out"), help="folder of weights for use and metrics")
    flag("--save_weight", help="name of the weights that this run writes")
    flag("--checkpoint_dir", default=str(ROOT / "checkpoints"), help="folder of the state to resume from")
    flag("--tokenizer_path", default=str(ROOT / "model"), help="folder of a Hugging Face tokenizer")
    flag("--cache_dir", default=str(ROOT / "dataset" / "cache"), help="folder of the token cache")
    group = parser.add_argument_group("model")
    model_shape_flags(group)
    flag = group.add_argument
    flag("--dropout", type=float, default=0.0, help="probability, at the embedding and after each attention")
    flag = parser.add_argument_group("training").add_argument
    flag("--epochs", type=int, help="passes over the data")
    flag("--batch_size", type=int, help="samples (packed: rows) per rank per micro-batch")
    flag("--accumulation_steps", type=int, default=1, help="micro-batches per update")
    more = f"Muon takes {MUON_RATE:g} times as much"
    flag("--learning_rate", type=float, help=f"peak; follows a cosine down to a tenth; {more}")
    flag("--warmup_updates", type=int, default=0, help="updates of linear warm-up")
    flag("--optimizer", choices=OPTIMIZERS, default="adamw", help="adamw, or muon for the layers' matrices")
    flag("--weight_decay", type=float, default=0.01, help="the optimizer's, on matrices only")
    flag("--grad_clip", type=float, default=1.0, help="largest norm of the gradient; 0: no clipping")
    flag("--max_seq_len", type=int, help="longest sample, in tokens")
    flag("--packing", type=int, choices=[0, 1], default=0, help="1: fill rows of --max_seq_len with whole samples")
    flag("--seed", type=int, default=42, help="of weights, order of samples and dropout")
    flag("--on_bad_data", choices=["stop", "skip"], default="stop", help="at a bad record: stop, or skip and list all")
    flag("--max_bad_share", type=float, default=0.1, help="share of bad records above which skipping stops")
    flag("--max_bad_updates", type=int, default=5, help="updates in a row without a finite gradient that end the run")
    flag("--extend_epochs", type=int, choices=[0, 1], default=0, help="1: a resumed run may have more --epochs")
    machine_flags(parser.add_argument_group("machine"))
    flag = parser.add_argument_group("logging").add_argument
    flag("--log_interval", type=int, default=100, help="micro-batches between log points")
    flag("--save_interval", type=int, default=1000, help="micro-batches between checkpoints; each epoch ends with one")
    flag("--eval_interval", type=int, default=0, help="micro-batches between evaluations; 0: at the end of each epoch")
    flag("--use_wandb", action="store_true", help="log to SwanLab")
    flag("--wandb_project", default="MiniMind-Trainer", help="SwanLab project")
    flag("--swanlab_mode", choices=sorted(MODES), default="cloud", help="where SwanLab keeps the run")
    parser.set_defaults(**defaults)
    return parser


def check_args(args: argparse.Namespace) -> None:
    """Find every impossible setting before anything is built.

    Raises:
        UserError: one line naming all of them.
    """
    at_least = {"epochs": 1, "batch_size": 1, "accumulation_steps": 1, "max_seq_len": 8, "num_hidden_layers": 1}
    at_least |= {"log_interval": 1, "save_interval": 1, "eval_interval": 0, "warmup_updates": 0, "num_workers": 0}
    at_least |= {"weight_decay": 0, "grad_clip": 0, "seed": 0, "hidden_size": 16, "max_bad_updates": 1}
    at_least |= {"rank_timeout": 1}
    given = vars(args)
    wrong = [f"--{k} {given[k]} must be {low} or more" for k, low in at_least.items() if not given[k] >= low]
    at_most = {"weight_decay": 1, "seed": 2**63 - 1, "max_seq_len": MiniMindConfig().max_position_embeddings}
    wrong += [f"--{k} {given[k]} must be {high} or less" for k, high in at_most.items() if given[k] > high]
    if not 0 < args.learning_rate < math.inf:
        wrong.append(f"--learning_rate {args.learning_rate} must be positive and finite")
    if not 0 <= args.dropout < 1:
        wrong.append(f"--dropout {args.dropout} must be from 0 to below 1")
    if not 0 <= args.max_bad_share <= 1:
        wrong.append(f"--max_bad_share {args.max_bad_share} must be from 0 to 1")
    if args.hidden_size % 16:
        wrong.append(f"--hidden_size {args.hidden_size} must be divisible by 16 (8 heads of an even size)")
    paths = [k for k in NAMES if Path(given[k]).name != given[k]]
    wrong += [f"--{k} {given[k]!r} must be a plain name; the folder is --save_dir" for k in paths]
    wrong += machine_mistakes(args)
    if wrong:
        raise UserError("; ".join(wrong))


def machine_mistakes(args: argparse.Namespace) -> list[str]:
    """What this machine cannot do."""
    try:
        device = pick_device(args.device, int(os.environ.get("LOCAL_RANK", "0")))
    except UserError as error:
        return [str(error)]
    wrong = []
    if args.dtype == "float16" and not native_float16(device):
        wrong.append(f"--dtype float16: this {device.type} has no arithmetic for it; use bfloat16 or float32 (or auto)")
    if args.use_compile and args.parallel == "fsdp":
        wrong.append("--use_compile 1 does not go with --parallel fsdp; leave one of them out")
    if args.optimizer == "muon" and args.parallel == "fsdp":
        wrong.append("--optimizer muon needs whole matrices, --parallel fsdp has parts of them; leave one of them out")
    return wrong


def model_config(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> MiniMindConfig:
    """The model's shape from the command line, its vocabulary and special tokens from the tokenizer."""
    shape = {"hidden_size": args.hidden_size, "num_hidden_layers": args.num_hidden_layers}
    dropout = getattr(args, "dropout", 0.0)
    experts = {"num_experts": getattr(args, "num_experts", 4), "num_experts_per_tok": getattr(args, "top_k", 1)}
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    return MiniMindConfig(
        **shape, **special, **experts, use_moe=bool(args.use_moe), dropout=dropout, vocab_size=len(tokenizer)
    )
