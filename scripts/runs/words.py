"""The words of the report, in English and Chinese. The English verdict is that of the run's last line."""

from trainer.report.warnings import SENTENCES

WORDS = {
    "en": SENTENCES
    | {
        "a model": "A model",
        "a model of": "A model of {parameters} parameters",
        "read": "{model} read {text} of text in {time}",
        "read tokens": "{model} read {tokens} tokens in {time}",
        "practised": "{model} practised for rewards, {updates} updates in {time}",
        "compared": "{count} runs compared, {time} in all",
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
        "unknown": "not known",
    },
    "zh": {
        "no loss": "没有一次更新的损失是有限值",
        "trained": "{name}：开始 {first:.3f}，最后 {last:.3f}",
        "diverged": "损失从第 {low_update:,.0f} 次更新的 {low:.3f} 又升高：训练发散",
        "nothing held out": "没有验证数据（--eval_share 0.02），无法知道在其他文本上的表现",
        "evaluated once": "{name} {now:.3f}，只评估了一次",
        "better": "{name} {now:.3f}，仍在变好（第 {before_update:,.0f} 次更新时为 {before:.3f}）",
        "same": "{name} {now:.3f}，自第 {before_update:,.0f} 次更新（{before:.3f}）以来几乎没有变化",
        "worse": "{name} {now:.3f}，最好的 {best:.3f} 出现在第 {best_update:,.0f} 次更新（{best_weights}）",
        "overfitting": "同时训练损失仍在下降，即过拟合",
        "repeats": "它的回答在重复：三元词组中只有 {share:.0%} 互不相同",
        "a model": "一个模型",
        "a model of": "一个 {parameters}参数的模型",
        "read": "{model}，用 {time}读了 {text} 文本",
        "read tokens": "{model}，用 {time}读了 {tokens} 个 token",
        "practised": "{model}，用 {time}做了 {updates} 次奖励更新",
        "compared": "比较 {count} 次训练，共 {time}",
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
