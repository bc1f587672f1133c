"""A self-contained page of samples for the browser: targets highlighted, each token's position and id under the mouse.

All text of the data is escaped, and the page's own security policy forbids scripts and whatever is not in the file.
"""

from html import escape

from dataset.lm_dataset import TokenDataset
from dataset.token_text import describe_sample, printable, whole_characters

STYLE = """
:root { color-scheme: light dark; --target: light-dark(#c8f0d0, #1d4a2a); --special: light-dark(#7a4fc0, #c0a0f0); }
body { font: 15px/1.6 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h2 { font-size: 1rem; overflow-wrap: anywhere; }
section { border-top: 1px solid #8886; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; }
.masked { opacity: .65; }
.target, .key { background: var(--target); border-radius: 2px; }
.special { color: var(--special); font-family: monospace; font-size: .85em; }
.text span { position: relative; }
.text span:hover { outline: 1px solid #888; opacity: 1; }
.text span:hover::after { content: attr(data-about); position: absolute; left: 0; top: 1.7em; z-index: 1;
  padding: 0 .5em; background: Canvas; color: CanvasText; border: 1px solid #888; white-space: pre;
  font: 12px/1.6 monospace; }
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(dataset: TokenDataset, tokenizer, count: int, report: str) -> str:
    """HTML of the first `count` items of the dataset and its report."""
    special = set(tokenizer.all_special_ids)
    parts = []
    for index in range(min(count, len(dataset))):
        row = dataset[index]
        if dataset.packing:
            parts.append(f"<h2>row {index}: {len(row)} samples</h2>")
        parts += [_section(dataset, tokenizer, special, sample) for sample in row]
    title = escape(", ".join(dataset.cache.files[:3]))
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n<style>{STYLE}</style></head><body>\n'
        '<p>The <span class="key">highlighted</span> tokens are targets: the loss is computed on them. '
        "The mouse over a token shows its position and id.</p>\n"
        f"<pre>{escape(printable(report))}</pre>\n{''.join(parts)}</body></html>\n"
    )


def _section(dataset: TokenDataset, tokenizer, special: set[int], sample: dict) -> str:
    token_ids, spans = sample["input_ids"].tolist(), []
    for first, last, text in whole_characters(tokenizer, token_ids):
        kind = "target" if sample["loss_mask"][first:last].any() else "masked"
        kind += " special" if token_ids[first] in special else ""
        ids = " ".join(map(str, token_ids[first:last]))
        positions = f"{first}-{last - 1}" if last > first + 1 else str(first)
        shown = "↵" + text if kind == "target" and not text.strip("\n") else text  # a target that nobody would see
        about = f"position {positions}, id {ids}, {kind}"
        spans.append(f'<span class="{kind}" data-about="{escape(about)}">{escape(printable(shown))}</span>')
    heading = escape(printable(describe_sample(dataset.cache, sample)))
    return f'<section><h2>{heading}</h2><div class="text">{"".join(spans)}</div></section>\n'
