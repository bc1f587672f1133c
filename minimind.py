"""A trained model in three lines of Python:

    from minimind import load
    model = load("out/demo")
    print(model.generate("Where does Pepa live?"))

Run it in this folder, or with this folder in PYTHONPATH.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from common.command_line import Parser  # first: without requirements it says so

# isort: split
from common.errors import UserError
from model.generation import generate
from model.prompts import document_tokens, prompt_tokens
from model.sampling import default_sampling
from trainer.weights.for_tools import add_trained_model_flags, load_model, model_path
from trainer.weights.paths import is_pretrained_only


class Model:
    """A model that writes text.

    Attributes:
        model: the `MiniMindForCausalLM`, in float32.
        tokenizer: its tokenizer.
        continues_texts: whether it was pretrained only, and so continues a text, where others answer.
    """

    def __init__(self, model: Any, tokenizer: Any, continues_texts: bool):
        self.model, self.tokenizer, self.continues_texts = model, tokenizer, continues_texts

    def generate(
        self, prompt: str | list[dict], max_new_tokens: int = 512, seed: int = 42, **sampling: Any
    ) -> str:
        """The answer to a message, or to a conversation, a list of `{"role": ..., "content": ...}`. A model
        that was pretrained only continues the message as a text, and what it adds is returned.

        The same seed gives the same answer. sampling: `temperature` (0: always the likeliest token), `top_p`,
        `top_k` and the penalties of `Sampling`; those left out are the model's own, as in scripts/chat.py.
        Raises UserError if the prompt is too long, or the chat template refuses it."""
        tokens = self._tokens(prompt)
        limit = self.model.config.max_position_embeddings
        if len(tokens) >= limit:
            raise UserError(
                f"the prompt is too long: {len(tokens)} tokens, and the context holds {limit} with the answer"
            )
        drawn = replace(default_sampling(self.model), seed=seed, **sampling)
        end_ids = [self.tokenizer.eos_token_id]
        ((answer,),) = generate(
            self.model, [tokens], [[drawn]], min(max_new_tokens, limit - len(tokens)), end_ids
        )
        return self.tokenizer.decode(answer.tokens, skip_special_tokens=True)

    def _tokens(self, prompt: str | list[dict]) -> list[int]:
        if isinstance(prompt, str):
            if self.continues_texts:
                return document_tokens(self.tokenizer, prompt)
            prompt = [{"role": "user", "content": prompt}]
        try:
            return prompt_tokens(self.tokenizer, prompt)
        except ValueError as error:
            raise UserError(str(error)) from error


def load(path: str | Path, **flags: Any) -> Model:
    """The model that `--model PATH` names for scripts/chat.py: a weights file, a checkpoint, a Hugging Face
    folder, a path on the hub (`hf://...`), or a folder with `full_sft` weights in it.

    flags: of scripts/chat.py, those that choose a model, without their dashes: `weight="pretrain"`,
    `lora="out/my_lora"`, `device="cpu"` ... Raises UserError if there is no such model, TypeError for another
    flag."""
    parser = Parser()
    add_trained_model_flags(parser)
    args = parser.parse_args([])
    if unknown := flags.keys() - vars(args).keys():
        raise TypeError(f"load() knows no {', '.join(sorted(unknown))}")
    vars(args).update(flags, model=str(path))
    continues_texts = is_pretrained_only(model_path(args)) and not args.lora
    return Model(*load_model(args), continues_texts)
