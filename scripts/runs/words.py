"""The words of the report, in English and Chinese."""

WORDS = {
    "en": {
        "a model": "A model",
        "a model of": "A model of {parameters} parameters",
        "read": "{model} read {text} of text in {time}",
        "read tokens": "{model} read {tokens} tokens in {time}",
        "practised": "{model} practised for rewards, {updates} updates in {time}",
        "compared": "{count} runs compared, {time} in all",
        "reward": "The reward went from {first:.3f} to {last:.3f} (means of the first and last tenth).",
        "nothing held out": "No text was held out, so nothing tells how it does on other text.",
        "one evaluation": "Its loss on text that it has not read is {now:.2f}.",
        "falling": (
            "Its loss on text that it has not read fell from {first:.2f} to {now:.2f} and was still falling: "
            "more time, or more text, would help."
        ),
        "flat": (
            "Its loss on text that it has not read fell from {first:.2f} to {now:.2f} and hardly changes any "
            "more: more text, or a larger model, would help."
        ),
        "risen": (
            "Its loss on text that it has not read was lowest, {low:.2f}, at update {update} and is now "
            "{now:.2f}: it learns its text by heart. More text would help; the weights named _best are those "
            "of the lowest loss."
        ),
        "choices": "It is as unsure of the next token as if {count} were equally likely.",
        "samples": "What it writes, first and last",
        "after": "update {update}",
        "all samples": "all samples",
        "held out legend": "dashed: on held-out text; solid: on what it trains on",
        "training legend": "on what it trains on",
        "plan": "The plan and what came",
        "planned": "planned",
        "came": "came",
        "time": "time",
        "tokens": "tokens read",
        "update": "updates",
        "seconds": "seconds",
        "run": "run",
        "loss": "training loss",
        "eval_loss": "held-out loss",
        "best_eval_loss": "lowest held-out loss",
        "best_update": "at update",
        "eval_reward": "held-out reward",
        "loss axis": "loss (lower is better)",
        "reward axis": "reward (higher is better)",
        "results": "Results",
        "curves": "more curves",
        "environment": "environment",
        "settings": "settings",
        "others": "starts, data and code",
        "said": "what the run said at its end",
        "unknown": "not known",
    },
    "zh": {
        "a model": "一个模型",
        "a model of": "一个 {parameters}参数的模型",
        "read": "{model}，用 {time}读了 {text} 文本",
        "read tokens": "{model}，用 {time}读了 {tokens} 个 token",
        "practised": "{model}，用 {time}做了 {updates} 次奖励更新",
        "compared": "比较 {count} 次训练，共 {time}",
        "reward": "奖励从 {first:.3f} 到 {last:.3f}（最初与最后十分之一的均值）。",
        "nothing held out": "没有留出验证文本，因此不知道它在没读过的文本上表现如何。",
        "one evaluation": "它在没读过的文本上的损失是 {now:.2f}。",
        "falling": (
            "它在没读过的文本上的损失从 {first:.2f} 降到 {now:.2f}，"
            "结束时仍在下降：更多时间或更多文本会有帮助。"
        ),
        "flat": (
            "它在没读过的文本上的损失从 {first:.2f} 降到 {now:.2f}，"
            "已几乎不再变化：需要更多文本或更大的模型。"
        ),
        "risen": (
            "它在没读过的文本上的损失在第 {update} 次更新时最低（{low:.2f}），"
            "现在是 {now:.2f}：它开始死记文本。更多文本会有帮助；名字带 _best 的权重是损失最低时的。"
        ),
        "choices": "它对下一个 token 的把握，相当于在 {count} 个等可能的选项中猜。",
        "samples": "它写的内容：最初与最后",
        "after": "第 {update} 次更新",
        "all samples": "全部样例",
        "held out legend": "虚线：留出的文本；实线：训练文本",
        "training legend": "训练文本",
        "plan": "计划与实际",
        "planned": "计划",
        "came": "实际",
        "time": "时间",
        "tokens": "读过的 token",
        "update": "更新次数",
        "seconds": "秒",
        "run": "训练",
        "loss": "训练损失",
        "eval_loss": "验证损失",
        "best_eval_loss": "最低验证损失",
        "best_update": "所在更新",
        "eval_reward": "验证奖励",
        "loss axis": "损失（越低越好）",
        "reward axis": "奖励（越高越好）",
        "results": "结果",
        "curves": "更多曲线",
        "environment": "环境",
        "settings": "设置",
        "others": "启动记录、数据与代码",
        "said": "训练结束时的输出",
        "unknown": "未知",
    },
}
UNITS = {"en": ((1e9, "B"), (1e6, "M"), (1e3, "k")), "zh": ((1e8, "亿"), (1e4, "万"))}
TIMES = {"en": ("seconds", "minutes", "hours"), "zh": ("秒", "分钟", "小时")}


def amount(number: float, lang: str) -> str:
    """A number of parameters or tokens as text for people."""
    for size, unit in UNITS[lang]:
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"


def long_time(seconds: float, lang: str) -> str:
    """Seconds in words."""
    of_seconds, of_minutes, of_hours = TIMES[lang]
    if seconds < 90:
        return f"{seconds:.0f} {of_seconds}"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} {of_minutes}"
    return f"{seconds / 3600:.1f} {of_hours}"
