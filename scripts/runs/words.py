"""The words of the report page, in English and Chinese. The English verdict comes from the trainer."""

import os

from trainer.report.warnings import SENTENCES

LANGUAGES = ("en", "zh")
UNITS = {"en": ("s", "min", "h"), "zh": ("秒", "分钟", "小时")}  # of time
WORDS = {
    "en": SENTENCES
    | {
        "; ": "; ",
        "model": "A model of {parameters} parameters, trained in {time}",
        "read": "{name}: {tokens} tokens of {data}",
        "passes": " ({passes} passes)",
        "held-out text": "On the held-out text",
        "training text": "On the text that it was trained on",
        "unsure": "{where}, each next piece of a word is as uncertain as a choice among {now} equally "
        "likely ones; before training, among {first}.",
        "some": "{count}",
        "all": "all {count}",
        "guesses": "{where}, it does no better than guessing among all {count} pieces of words.",
        "compared": "{count} run(s), {time} in all",
        "samples": "What it writes at the beginning and at the end, always taking the likeliest words",
        "sampled": "at the chat's temperature",
        "update at": "update {update:,}",
        "unchanged": "updates {first:,} to {last:,}",
        "wrong": "Held-out questions that it answers wrongly",
        "right": "in the data",
        "its own": "its answer",
        "plan": "updates and evaluations took {came}; planned: {planned}",
        "results": "Results",
        "curves": "more curves",
        "settings": "settings",
        "others": "environment, starts, data and code",
        "unknown": "not known",
    },
    "zh": {
        "no loss": "没有一次更新的损失是有限值",
        "trained": "{name}：开始 {first:.3f}，最后 {last:.3f}",
        "diverged": "损失从第 {low_update:,.0f} 次更新的 {low:.3f} 又升高：训练发散",
        "hardly fell": "下降不到 2 %，几乎什么也没学到",
        "still falling": "仍在下降",
        "nothing held out": "没有验证数据（--eval_share 0.02），无法知道在其他文本上的表现",
        "learned": "{name}：第一次更新之前 {first:.3f}，最后 {now:.3f}",
        "nothing learned": "几乎什么也没学到：--learning_rate {rate:g} 太小；短暂预训练之后用 1e-3",
        "held out": "{name}：最后 {now:.3f}",
        "own text": "这是在训练数据上测得的，不能说明在其他文本上的表现",
        "better": "仍在变好（第 {before_update:,.0f} 次更新时为 {before:.3f}）",
        "same": "自第 {before_update:,.0f} 次更新（{before:.3f}）以来几乎没有变化",
        "worse": "最好的 {best:.3f} 出现在第 {best_update:,.0f} 次更新（{best_weights}）",
        "overfitting": "同时训练损失仍在下降，即过拟合",
        "fewer right": "第 {best_update:,.0f} 次更新时为 {best:.3f}，但那时答对的问题更少",
        "repeats": "它的回答在重复：三元词组中只有 {share:.0%} 互不相同",
        "answers": "验证问题答对 {right:.0f}/{asked:.0f}",
        "answers now": "验证问题答对 {right:.0f}/{asked:.0f}（第一次更新之前 {before:.0f}）",
        "answers known": "其中 {asked:.0f} 题的答案在训练对话里，答对 {right:.0f}",
        "answers new": "{asked:.0f} 题的答案不在训练对话里，答对 {right:.0f}",
        "answers few": "下一步：更大的模型、更长的预训练、用多种说法陈述同一内容的文本，或更多对话",
        "; ": "；",
        "model": "{parameters}参数的模型，训练用时 {time}",
        "read": "{name}：{data} 的 {tokens} 个 token",
        "passes": "（{passes} 遍）",
        "held-out text": "在留出的文本上",
        "training text": "在训练过的文本上",
        "unsure": "{where}，它每猜一个词片，相当于在 {now} 个同样可能的词片之间犹豫；训练之前是{first} 个。",
        "some": " {count}",
        "all": "全部 {count}",
        "guesses": "{where}，它并不比在全部 {count} 个词片之间随意猜测更好。",
        "compared": "{count} 次训练，共 {time}",
        "samples": "它写的内容：最初与最后，每次都取最可能的词",
        "sampled": "按聊天的温度",
        "update at": "第 {update:,} 次更新",
        "unchanged": "第 {first:,} 至 {last:,} 次更新",
        "wrong": "答错的验证问题",
        "right": "数据中的回答",
        "its own": "它的回答",
        "plan": "更新和评估用时 {came}；计划：{planned}",
        "results": "结果",
        "curves": "更多曲线",
        "settings": "设置",
        "others": "环境、启动记录、数据与代码",
        "unknown": "未知",
    },
}


def amount(parameters: int, lang: str) -> str:
    """A number of parameters as text: 1.30 M, in Chinese 130 万."""
    if lang != "zh":
        return f"{parameters / 1e6:.2f} M"
    number, unit = (parameters / 1e8, "亿") if parameters >= 1e8 else (parameters / 1e4, "万")
    return f"{number:,.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"


def user_language() -> str:
    """The language of the system's locale if the report has words in it, otherwise English."""
    for name in ("LC_ALL", "LC_MESSAGES", "LANG"):
        if value := os.environ.get(name):
            return "zh" if value.startswith("zh") else "en"
    return "en"
