// Every word of the page in English and Chinese.

const TEXT = {
  en: {
    title: "MiniMind", chat: "Chat", training: "Training", newChat: "New chat", conversations: "Conversations",
    menu: "Menu", close: "Close", theme: "Light or dark", language: "中文", languageLabel: "Switch to Chinese",
    settings: "Settings", model: "Model", send: "Send", stop: "Stop", edit: "Edit", copy: "Copy", regenerate: "Answer again",
    rename: "Rename", remove: "Delete", undo: "Undo", cancel: "Cancel", save: "Save", exportOne: "Export this chat", exportAll: "Export all",
    messageLabel: "Your message", placeholder: "Write a message",
    placeholderText: "Write a beginning; the model goes on",
    hint: "Enter sends, Shift + Enter starts a new line, Esc stops",
    continues: "This model was pretrained only: it has not learnt to answer and continues your text.",
    noModel: "No model yet.",
    greeting: "What shall we talk about?",
    greetingMore: "This model runs on your machine. Conversations stay in this browser.",
    examples: "Hello\nWho are you?\nWhat can you do?",
    you: "You", assistant: "Model", toolResult: "Tool result",
    reasoning: "Reasoning", reasoningNow: "Reasoning …", toolCall: "Calls {name}", sendResult: "Send result",
    resultLabel: "Result of {name}", usage: "{tokens} tokens", speed: "{rate} tokens/s",
    stopped: "Stopped", cut: "The answer reached its length limit.",
    dropped: "The context is full: the oldest {n} messages were left out.",
    answering: "The model is answering", answered: "Answer: {text}",
    deleted: "“{title}” was deleted", replaced: "The messages after it were removed",
    compare: "Second model", compareWith: "Compare with …",
    storageFull: "The browser’s storage is full. Export chats and delete some, or new messages will be lost.",
    temperature: "Temperature", temperatureHelp: "0 always takes the likeliest word; higher is more varied",
    top_p: "Top p", top_pHelp: "Chooses among the likeliest words that together have this probability",
    top_k: "Top k", top_kHelp: "Chooses among so many of the likeliest words; 0: among all",
    repetition_penalty: "Repetition penalty", repetition_penaltyHelp: "Above 1 the model repeats itself less, prompt included",
    frequency_penalty: "Frequency penalty", frequency_penaltyHelp: "Above 0 words become less likely each time they are written",
    presence_penalty: "Presence penalty", presence_penaltyHelp: "Above 0 words become less likely once they are written",
    max_tokens: "Longest answer", max_tokensHelp: "In tokens",
    seed: "Seed", seedHelp: "The same seed gives the same answer again",
    system: "System prompt", systemHelp: "Stands before every conversation",
    thinking: "Reason before answering", tools: "Tools", toolsHelp: "A JSON list of functions that the model may call",
    toolsBad: "The tools are no valid JSON list", auto: "default", reset: "Reset to defaults",
    keyTitle: "This server asks for a key", keyHelp: "It was set with --api_key when the server was started.",
    keyLabel: "API key", keyWrong: "This key is not the right one.", errorKey: "The server asks for a key.", errorBusy: "The server is busy. Try again in {seconds} seconds.",
    errorNetwork: "The server does not answer. Is it still running?",
    errorLong: "This message is too long for the model. Shorten it.",
    errorServer: "The server failed: {message}", errorRequest: "The server refused this: {message}",
    errorCut: "The connection was lost before the answer was complete.",
    runs: "Runs", xAxis: "Horizontal axis", update: "Updates", tokens: "Tokens", seconds: "Seconds",
    logScale: "Log scale", smoothing: "Smoothing", noneChosen: "Choose one or more runs",
    noRuns: "No training runs yet. They appear here as soon as a training writes into the folder of this server.",
    loss: "Loss", eval_loss: "Held-out loss", learning_rate: "Learning rate", grad_norm: "Gradient norm",
    reward: "Reward", eval_reward: "Held-out reward", kl: "KL from the reference", tokens_per_second: "Tokens per second",
    best_eval_loss: "Best held-out loss", best_update: "at update",
    more: "More curves", run: "Run", samples: "Samples",
    running: "running", finished: "finished", endedEarly: "ended early", left: "{time} left", updates: "{n} updates",
    diverged: "Diverged: the loss is not finite", skipped: "{n} updates skipped (not finite)",
  },
  zh: {
    title: "MiniMind", chat: "对话", training: "训练曲线", newChat: "新对话", conversations: "对话列表",
    menu: "菜单", close: "关闭", theme: "浅色或深色", language: "English", languageLabel: "切换到英文",
    settings: "设置", model: "模型", send: "发送", stop: "停止", edit: "编辑", copy: "复制", regenerate: "重新回答",
    rename: "重命名", remove: "删除", undo: "撤销", cancel: "取消", save: "保存", exportOne: "导出此对话", exportAll: "全部导出",
    messageLabel: "你的消息", placeholder: "输入消息",
    placeholderText: "写一个开头，模型接着写",
    hint: "Enter 发送，Shift + Enter 换行，Esc 停止",
    continues: "这个模型只做过预训练，还没有学会回答，只会续写你的文字。",
    noModel: "还没有模型。",
    greeting: "想聊点什么？",
    greetingMore: "模型在你自己的机器上运行，对话只保存在这个浏览器里。",
    examples: "你好\n你是谁？\n你能做什么？",
    you: "你", assistant: "模型", toolResult: "工具结果",
    reasoning: "思考过程", reasoningNow: "正在思考……", toolCall: "调用 {name}", sendResult: "发送结果",
    resultLabel: "{name} 的结果", usage: "{tokens} 个 token", speed: "{rate} token/秒",
    stopped: "已停止", cut: "回答达到了长度上限。",
    dropped: "上下文已满：最早的 {n} 条消息没有发送给模型。",
    answering: "模型正在回答", answered: "回答：{text}",
    deleted: "已删除“{title}”", replaced: "它之后的消息已移除",
    compare: "第二个模型", compareWith: "与……比较",
    storageFull: "浏览器的存储空间已满。请导出并删除一些对话，否则新消息会丢失。",
    temperature: "温度", temperatureHelp: "0 总是选最可能的词；越高越多样",
    top_p: "Top p", top_pHelp: "在累计概率达到该值的最可能的词中选择",
    top_k: "Top k", top_kHelp: "只在最可能的这么多个词中选择；0 表示不限",
    repetition_penalty: "重复惩罚", repetition_penaltyHelp: "大于 1 时减少重复，prompt 里的词也算",
    frequency_penalty: "频率惩罚", frequency_penaltyHelp: "大于 0 时，回答里的词每出现一次就更不容易再出现",
    presence_penalty: "存在惩罚", presence_penaltyHelp: "大于 0 时，回答里出现过的词更不容易再出现",
    max_tokens: "回答的最大长度", max_tokensHelp: "以 token 计",
    seed: "随机种子", seedHelp: "相同的种子得到相同的回答",
    system: "系统提示词", systemHelp: "放在每个对话的最前面",
    thinking: "先思考再回答", tools: "工具", toolsHelp: "模型可以调用的函数，JSON 列表",
    toolsBad: "工具不是有效的 JSON 列表", auto: "默认", reset: "恢复默认值",
    keyTitle: "服务器需要密钥", keyHelp: "它在启动服务器时由 --api_key 设定。",
    keyLabel: "API 密钥", keyWrong: "密钥不正确。", errorKey: "服务器需要密钥。", errorBusy: "服务器正忙，请在 {seconds} 秒后再试。",
    errorNetwork: "服务器没有响应。它还在运行吗？",
    errorLong: "这条消息对这个模型来说太长了，请缩短。",
    errorServer: "服务器出错：{message}", errorRequest: "服务器拒绝了请求：{message}",
    errorCut: "回答还没有完成，连接就断开了。",
    runs: "训练", xAxis: "横轴", update: "更新次数", tokens: "token 数", seconds: "秒",
    logScale: "对数坐标", smoothing: "平滑", noneChosen: "请选择一个或多个训练",
    noRuns: "还没有训练。训练向本服务器的文件夹写入第一行日志后，就会出现在这里。",
    loss: "损失", eval_loss: "验证损失", learning_rate: "学习率", grad_norm: "梯度范数",
    reward: "奖励", eval_reward: "验证奖励", kl: "与参考模型的 KL", tokens_per_second: "每秒 token 数",
    best_eval_loss: "最低验证损失", best_update: "所在更新",
    more: "更多曲线", run: "训练", samples: "样例回答",
    running: "进行中", finished: "已完成", endedEarly: "提前结束", left: "还剩 {time}", updates: "{n} 次更新",
    diverged: "已发散：损失不是有限值", skipped: "跳过了 {n} 次更新（非有限值）",
  },
};

let language = "en";

/** The text of a key, with {name} filled in. */
export function t(key, values = {}) {
  return (TEXT[language][key] ?? key).replace(/\{(\w+)\}/g, (whole, name) => String(values[name] ?? whole));
}

export const knows = (key) => Object.hasOwn(TEXT.en, key);
export const currentLanguage = () => language;

/** Choose the language and put it into the elements that name a text; listeners of `language` draw the rest again. */
export function setLanguage(chosen) {
  language = chosen === "zh" ? "zh" : "en";
  document.documentElement.lang = language === "zh" ? "zh-CN" : "en";
  for (const element of document.querySelectorAll("[data-text]")) element.textContent = t(element.dataset.text);
  for (const element of document.querySelectorAll("[data-hint]")) element.placeholder = t(element.dataset.hint);
  for (const element of document.querySelectorAll("[data-label]")) {
    element.setAttribute("aria-label", t(element.dataset.label));
    if (element.tagName === "BUTTON") element.title = t(element.dataset.label);
  }
  document.dispatchEvent(new CustomEvent("language"));
}
