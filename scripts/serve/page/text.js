// Every word of the page in English and Chinese.

const TEXT = {
  en: {
    title: "MiniMind", chat: "Chat", training: "Training", newChat: "New chat", conversations: "Conversations",
    menu: "Menu", close: "Close", theme: "Light or dark", language: "中文", languageLabel: "Switch to Chinese",
    settings: "Settings", model: "Model", send: "Send", stop: "Stop", edit: "Edit", copy: "Copy", regenerate: "Answer again",
    rename: "Rename", remove: "Delete", undo: "Undo", cancel: "Cancel", save: "Save", latest: "To the latest message",
    messageLabel: "Your message", placeholder: "Write a message",
    hint: "Enter sends, Shift + Enter starts a new line, Esc stops",
    greeting: "What shall we talk about?",
    greetingMore: "This model runs on your machine. Conversations stay in this browser.",
    examples: "Hello\nWho are you?\nWhat can you do?",
    you: "You", assistant: "Model", toolResult: "Tool result", untitled: "New chat",
    answering: "The model is answering", answered: "Answer: {text}",
    reasoning: "Reasoning", reasoningNow: "Reasoning …", toolCall: "Calls {name}", sendResult: "Send result",
    resultLabel: "Result of {name}", usage: "{tokens} tokens", speed: "{rate} tokens/s",
    stopped: "Stopped", cut: "The answer reached its length limit.",
    deleted: "“{title}” was deleted", replaced: "The messages after it were removed",
    exportOne: "Export this chat", exportAll: "Export all", importFile: "Import",
    imported: "{n} chats imported.", droppedRecords: "{n} lines without a conversation were left out.",
    droppedMessages: "{n} messages of unknown roles were left out.",
    importBad: "This file holds no conversations. Choose a JSONL file exported from this page, or one of SFT.",
    compare: "Second model", compareWith: "Compare with …", comparedNoMore: "The second model’s answers were removed",
    storageFull: "The browser’s storage is full. Export chats and delete some, or new messages will be lost.",
    temperature: "Temperature", temperatureHelp: "0 always takes the likeliest word; higher is more varied",
    topP: "Top p", topPHelp: "Chooses among the likeliest words that together have this probability",
    topK: "Top k", topKHelp: "Chooses among so many of the likeliest words; 0: among all",
    runTool: "Let the server run the tool: {name}",
    maxTokens: "Longest answer", maxTokensHelp: "In tokens",
    seed: "Seed", seedHelp: "The same seed gives the same answer again",
    system: "System prompt", systemHelp: "Stands before every conversation",
    tokenProbabilities: "Show the tokens’ probabilities", tokenProbabilitiesShown: "Tokens, shaded by probability",
    thinking: "Reason before answering", tools: "Tools", toolsHelp: "A JSON list of functions that the model may call",
    toolsBad: "The tools are no valid JSON list", auto: "default", reset: "Reset to defaults",
    keyTitle: "This server asks for a key", keyHelp: "It was set with --api_key when the server was started.",
    keyLabel: "API key", keyWrong: "This key is not the right one.",
    errorNetwork: "The server does not answer. Is it still running?",
    errorKey: "The server asks for a key.", errorBusy: "The server is busy. Try again in a moment.",
    errorLong: "The conversation is too long for this model. Start a new chat or edit an earlier message.",
    errorServer: "The server failed ({status}). {message}", errorRequest: "The server refused this: {message}",
    errorCut: "The connection was lost before the answer was complete.", noModels: "No model",
    runs: "Runs", runsFilter: "Filter runs", xAxis: "Horizontal axis", update: "Updates", tokens: "Tokens", seconds: "Time",
    logScale: "Log scale", smoothing: "Smoothing", following: "Live", noRuns: "No training runs yet",
    noRunsMore: "They appear here as soon as a training writes its first log line into the folder of this server.",
    noneChosen: "Choose one or more runs", readingRuns: "Reading the runs …",
    skipped: "{n} updates skipped (not finite)", notFinite: "{n} records without a finite loss",
    diverged: "Diverged: the loss is not finite", running: "running", finished: "finished", stoppedRun: "ended early", left: "{time} left",
    updates: "{n} updates", unit_s: "s", unit_min: "min", unit_h: "h", loss: "Loss", eval_loss: "Held-out loss", learning_rate: "Learning rate", grad_norm: "Gradient norm",
    reward: "Reward", eval_reward: "Held-out reward", kl: "KL from the reference", entropy: "Entropy per token", completion_length: "Tokens of a completion",
    tokens_per_second: "Tokens per second", expert_load: "Experts’ load", more: "More curves", table: "Table of runs", best_eval_loss: "Best held-out loss", best_update: "at update",
    heldOut: "held-out", samples: "Samples", atUpdate: "update {n}",
    run: "Run", status: "Status", damaged: "{n} damaged lines were left out", thinned: "each point is the mean of {n} records",
    plotLabel: "{title}: {values}. Arrow keys move along the curve.", rangeOf: "{low} to {high}",
  },
  zh: {
    title: "MiniMind", chat: "对话", training: "训练曲线", newChat: "新对话", conversations: "对话列表",
    menu: "菜单", close: "关闭", theme: "浅色或深色", language: "English", languageLabel: "切换到英文",
    settings: "设置", model: "模型", send: "发送", stop: "停止", edit: "编辑", copy: "复制", regenerate: "重新回答",
    rename: "重命名", remove: "删除", undo: "撤销", cancel: "取消", save: "保存", latest: "到最新消息",
    messageLabel: "你的消息", placeholder: "输入消息",
    hint: "Enter 发送，Shift + Enter 换行，Esc 停止",
    greeting: "想聊点什么？",
    greetingMore: "模型在你自己的机器上运行，对话只保存在这个浏览器里。",
    examples: "你好\n你是谁？\n你能做什么？",
    you: "你", assistant: "模型", toolResult: "工具结果", untitled: "新对话",
    answering: "模型正在回答", answered: "回答：{text}",
    reasoning: "思考过程", reasoningNow: "正在思考……", toolCall: "调用 {name}", sendResult: "发送结果",
    resultLabel: "{name} 的结果", usage: "{tokens} 个 token", speed: "{rate} token/秒",
    stopped: "已停止", cut: "回答达到了长度上限。",
    deleted: "已删除“{title}”", replaced: "它之后的消息已移除",
    exportOne: "导出此对话", exportAll: "全部导出", importFile: "导入",
    imported: "已导入 {n} 个对话。", droppedRecords: "略过了 {n} 行没有对话的内容。",
    droppedMessages: "略过了 {n} 条角色未知的消息。",
    importBad: "这个文件里没有对话。请选择从本页导出的 JSONL 文件，或 SFT 数据。",
    compare: "第二个模型", compareWith: "与……比较", comparedNoMore: "已移除第二个模型的回答",
    storageFull: "浏览器的存储空间已满。请导出并删除一些对话，否则新消息会丢失。",
    temperature: "温度", temperatureHelp: "0 总是选最可能的词；越高越多样",
    topP: "Top p", topPHelp: "在累计概率达到该值的最可能的词中选择",
    topK: "Top k", topKHelp: "只在最可能的这么多个词中选择；0 表示不限",
    runTool: "由服务器执行工具：{name}",
    maxTokens: "回答的最大长度", maxTokensHelp: "以 token 计",
    seed: "随机种子", seedHelp: "相同的种子得到相同的回答",
    system: "系统提示词", systemHelp: "放在每个对话的最前面",
    tokenProbabilities: "显示每个 token 的概率", tokenProbabilitiesShown: "按概率着色的 token",
    thinking: "先思考再回答", tools: "工具", toolsHelp: "模型可以调用的函数，JSON 列表",
    toolsBad: "工具不是有效的 JSON 列表", auto: "默认", reset: "恢复默认值",
    keyTitle: "服务器需要密钥", keyHelp: "它在启动服务器时由 --api_key 设定。",
    keyLabel: "API 密钥", keyWrong: "密钥不正确。",
    errorNetwork: "服务器没有响应。它还在运行吗？",
    errorKey: "服务器需要密钥。", errorBusy: "服务器正忙，请稍后再试。",
    errorLong: "对话对这个模型来说太长了。请开始新对话，或编辑较早的消息。",
    errorServer: "服务器出错（{status}）。{message}", errorRequest: "服务器拒绝了请求：{message}",
    errorCut: "回答还没有完成，连接就断开了。", noModels: "没有模型",
    runs: "训练", runsFilter: "筛选训练", xAxis: "横轴", update: "更新次数", tokens: "token 数", seconds: "时间",
    logScale: "对数坐标", smoothing: "平滑", following: "实时", noRuns: "还没有训练",
    noRunsMore: "训练向本服务器的文件夹写入第一行日志后，就会出现在这里。",
    noneChosen: "请选择一个或多个训练", readingRuns: "正在读取训练记录……",
    skipped: "跳过了 {n} 次更新（非有限值）", notFinite: "{n} 条记录的损失不是有限值",
    diverged: "已发散：损失不是有限值", running: "进行中", finished: "已完成", stoppedRun: "提前结束", left: "还剩 {time}",
    updates: "更新 {n} 次", unit_s: "秒", unit_min: "分", unit_h: "小时", loss: "损失", eval_loss: "验证损失", learning_rate: "学习率", grad_norm: "梯度范数",
    reward: "奖励", eval_reward: "验证奖励", kl: "与参考模型的 KL", entropy: "每个 token 的熵", completion_length: "回答的 token 数",
    tokens_per_second: "每秒 token 数", expert_load: "专家负载", more: "更多曲线", table: "训练一览", best_eval_loss: "最低验证损失", best_update: "所在更新",
    heldOut: "验证", samples: "样例回答", atUpdate: "更新 {n}",
    run: "训练", status: "状态", damaged: "跳过了 {n} 行损坏的日志", thinned: "每个点是 {n} 条记录的平均",
    plotLabel: "{title}：{values}。方向键沿曲线移动。", rangeOf: "{low} 到 {high}",
  },
};

let language = "en";

/** The text of a key, with {name} filled in; an unknown key is shown as it is. */
export function t(key, values = {}) {
  const text = knows(key) ? TEXT[language][key] : key;
  return text.replace(/\{(\w+)\}/g, (whole, name) => String(values[name] ?? whole));
}

export const knows = (key) => Object.hasOwn(TEXT.en, key);
export const currentLanguage = () => language;

/** Choose the language and put it into the elements that name a text; listeners of `language` draw the rest again. */
export function setLanguage(chosen) {
  language = chosen === "zh" ? "zh" : "en";
  document.documentElement.lang = language === "zh" ? "zh-CN" : "en";
  document.title = t("title");
  for (const element of document.querySelectorAll("[data-text]")) element.textContent = t(element.dataset.text);
  for (const element of document.querySelectorAll("[data-hint]")) element.placeholder = t(element.dataset.hint);
  for (const element of document.querySelectorAll("[data-label]")) {
    element.setAttribute("aria-label", t(element.dataset.label));
    if (element.tagName === "BUTTON") element.title = t(element.dataset.label);
  }
  document.dispatchEvent(new CustomEvent("language"));
}

/** The remembered language, else the browser's. */
export function firstLanguage(remembered) {
  return remembered || (navigator.language.toLowerCase().startsWith("zh") ? "zh" : "en");
}

/** Keys that one language has and the other lacks (a test looks here). */
export function untranslated() {
  const [en, zh] = [new Set(Object.keys(TEXT.en)), new Set(Object.keys(TEXT.zh))];
  return [...en.symmetricDifference(zh)];
}
