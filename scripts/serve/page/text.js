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
    trainOne: "Train one →", trainOff: "To train from this page, start the server with --train 1.",
    newModel: "New model", trainings: "Trainings",
    dropFiles: "Drop text or conversations here, or choose files",
    fileKinds: ".txt, .jsonl, .json, .csv or .parquet, also .gz; UTF-8. They stay on this machine.",
    uploading: "{name}: {percent} % of {size}",
    file_text: "{name}: text to read, {size} · {n} documents", file_chat: "{name}: {n} conversations",
    showFirst: "Show the first three", removeFile: "Remove",
    willDoBoth: "It reads the text, then learns from the conversations how to answer.",
    willContinue: "It will continue texts. To chat, add conversations.",
    willReadChats: "It reads the conversations as text, then learns from them how to answer.",
    modelName: "Name", howLong: "How long may it take?",
    hours_0: "10 minutes", hours_1: "1 hour", hours_2: "a night (8 h)", otherHours: "other, in hours:",
    modelSize: "Size", planChooses: "the plan chooses", layers: "{d} layers, {w} wide", makePlan: "Make a plan",
    skipBad: "Leave out records that cannot be used (at most 10 %)",
    state_form: "new", state_new: "new", state_planning: "planning", state_planned: "the plan is made", state_training: "training",
    state_saving: "saving", state_stopped: "stopped", state_cut: "ended", state_failed: "failed", state_ready: "ready",
    planningHelp: "Looking at the data and timing models on this machine. About a minute, more for large files.",
    planModel: "A model of {m} M parameters ({w} x {d}). ", planReads: "It reads the text {times}",
    planReadsPart: "It reads {percent} % of the text", planThen: ", then the conversations {times}", fullStop: ".",
    once: "once", times: "{n} times",
    planTime: "About {time}: done at {clock}. Limited by the {limit}.",
    limit_data: "data", limit_memory: "memory", limit_hours: "time", limit_size: "chosen size",
    planNeeds: "Needs {a} GB of memory and {b} GB of disk; free are {c} and {e}.",
    unwise: "Think again:", unwise_more_time: "Only {updates} updates teach little: more time helps.",
    unwise_more_data: "Only {updates} updates teach little: more data help.",
    unwise_short_tokens: "The vocabulary was made for other text: a token spells only few letters of this one.",
    unwise_few_conversations: "{conversations} conversations teach a manner of answering, no knowledge.",
    unwise_leaks: "Some of the held-out questions are nearly the same as trained ones: the held-out loss says less.",
    unwise_disk: "The disk is too full: {need} GB are needed, {free} GB are free.",
    startJob: "Start", changePlan: "Change", inTerminal: "The same in a terminal",
    stageReading: "Reading the text, {i} of {n}", stageAnswering: "Learning to answer, {i} of {n}", writingReport: "Writing the report",
    progress: "{u} of {v} updates · about {left} left, done at {clock} (planned: {planned})",
    starting: "Starting; the first figures come within a minute.",
    heldOut: "Held-out loss {now}, at the start {first}.", itWrites: "It writes: “{prompt}” → “{answer}”",
    canClose: "You can close this page, and stop the server: it goes on.",
    stopAndSave: "Stop and save", saving: "Finishing this update and saving …",
    slowSave: "This takes longer than usual.", endAtOnce: "End at once",
    endAtOnceHelp: "What came after the last checkpoint is trained again.",
    noNews: "No news for {time}. The log says more.", showLog: "Show the log", goOn: "Go on",
    wasStopped: "Stopped at update {u} of {v}. Nothing is lost.",
    wasCut: "It ended without saying why: power, memory, or somebody killed it. It goes on from its last checkpoint.",
    ready: "Ready.", chatWithIt: "Chat with it", downloadReport: "Download the report",
    error_memory: "Out of memory. Close other programs and go on, or plan a smaller model.",
    error_disk: "The disk is full: {free} are free. Make room, then go on.",
    error_room: "{need} of disk are needed, {free} are free.",
    error_not_utf8: "Not UTF-8. Save the file as UTF-8 (Notepad: Save as, Encoding) and choose it again.",
    error_bad_record: "{file}, line {line}: {why}. Mend it, or leave such records out.",
    error_too_little: "Too little text: nothing could be held out to see whether it learns. Add more.",
    error_hours: "In this time it would learn nothing. Give it more.",
    error_busy: "“{name}” is being trained, about {time} left. One at a time: stop it, or wait.",
    error_exists: "A model of this name is there already.",
    error_kind: "This kind of file is not read.", error_no_record: "{file} holds nothing to read.",
    error_too_large: "The file is larger than {most}.", error_cut: "The upload was cut. Choose the file again.",
    error_used: "A training that has not come to its end needs this file.",
    error_not_running: "It has ended already, or was started in a terminal.",
    error_field: "The server does not take this: {text}", error_other: "Something else: {text}",
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
    trainOne: "训练一个 →", trainOff: "要在此页面训练，请用 --train 1 启动服务器。",
    newModel: "新模型", trainings: "训练列表",
    dropFiles: "把文本或对话文件拖到这里，或选择文件",
    fileKinds: ".txt、.jsonl、.json、.csv 或 .parquet，也可以是 .gz；UTF-8 编码。文件只留在这台机器上。",
    uploading: "{name}：{size} 的 {percent}%",
    file_text: "{name}：用来阅读的文本，{size} · {n} 篇", file_chat: "{name}：{n} 个对话",
    showFirst: "查看前三条", removeFile: "移除",
    willDoBoth: "先阅读文本，再从对话中学习如何回答。",
    willContinue: "它会续写文本。想要聊天，请再加入对话。",
    willReadChats: "先把对话当作文本阅读，再从中学习如何回答。",
    modelName: "名称", howLong: "最多用多长时间？",
    hours_0: "10 分钟", hours_1: "1 小时", hours_2: "一晚（8 小时）", otherHours: "其他（小时）：",
    modelSize: "大小", planChooses: "由计划决定", layers: "{d} 层，宽 {w}", makePlan: "制定计划",
    skipBad: "跳过无法使用的记录（至多 10%）",
    state_form: "新建", state_new: "新建", state_planning: "正在制定计划", state_planned: "计划已完成", state_training: "正在训练",
    state_saving: "正在保存", state_stopped: "已停止", state_cut: "已结束", state_failed: "失败", state_ready: "完成",
    planningHelp: "正在查看数据并在这台机器上测量速度。约一分钟，文件大时更久。",
    planModel: "{m} M 参数的模型（{w} × {d}）。", planReads: "文本读 {times}",
    planReadsPart: "读文本的 {percent}%", planThen: "，对话读 {times}", fullStop: "。",
    once: "1 遍", times: "{n} 遍",
    planTime: "约 {time}，{clock} 完成。受限于{limit}。",
    limit_data: "数据", limit_memory: "内存", limit_hours: "时间", limit_size: "所选的大小",
    planNeeds: "需要内存 {a} GB、磁盘 {b} GB；可用 {c} GB 和 {e} GB。",
    unwise: "请再想想：", unwise_more_time: "只有 {updates} 次更新，学不到多少：更多时间会有帮助。",
    unwise_more_data: "只有 {updates} 次更新，学不到多少：更多数据会有帮助。",
    unwise_short_tokens: "词表是为别的文本制作的：一个 token 只能表示这种文本的少数字符。",
    unwise_few_conversations: "{conversations} 个对话只能教会回答的方式，教不了知识。",
    unwise_leaks: "部分验证问题与训练问题几乎相同：验证损失的参考价值较低。",
    unwise_disk: "磁盘空间不足：需要 {need} GB，可用 {free} GB。",
    startJob: "开始", changePlan: "修改", inTerminal: "在终端中",
    stageReading: "阅读文本，第 {i} 步，共 {n} 步", stageAnswering: "学习回答，第 {i} 步，共 {n} 步", writingReport: "生成报告",
    progress: "{v} 次更新中的第 {u} 次 · 约剩 {left}，{clock} 完成（计划：{planned}）",
    starting: "正在启动，一分钟内出现第一批数据。",
    heldOut: "验证损失 {now}，开始时 {first}。", itWrites: "它写道：“{prompt}”→“{answer}”",
    canClose: "可以关闭此页面，也可以停止服务器：训练会继续。",
    stopAndSave: "停止并保存", saving: "正在完成这次更新并保存……",
    slowSave: "比平时久。", endAtOnce: "立即结束",
    endAtOnceHelp: "最近检查点之后的部分会重新训练。",
    noNews: "已有 {time} 没有消息。详情见日志。", showLog: "查看日志", goOn: "继续",
    wasStopped: "已停在第 {u} 次更新（共 {v} 次），没有丢失。",
    wasCut: "它没有说明原因就结束了：断电、内存不足或被终止。可从最近的检查点继续。",
    ready: "完成。", chatWithIt: "和它聊天", downloadReport: "下载报告",
    error_memory: "内存不足。请关闭其他程序后继续，或计划一个更小的模型。",
    error_disk: "磁盘已满：可用 {free}。请腾出空间后继续。",
    error_room: "需要磁盘 {need}，可用 {free}。",
    error_not_utf8: "不是 UTF-8。请另存为 UTF-8（记事本：另存为 → 编码），再选一次。",
    error_bad_record: "{file} 第 {line} 行：{why}。请修改，或跳过这样的记录。",
    error_too_little: "文本太少，无法留出一部分检查学习效果。请增加文本。",
    error_hours: "这点时间学不到东西。请给它更多时间。",
    error_busy: "“{name}”正在训练，约剩 {time}。一次只能训练一个：请停止它或等待。",
    error_exists: "已经有同名的模型。",
    error_kind: "不支持这种文件。", error_no_record: "{file} 里没有可读的内容。",
    error_too_large: "文件超过 {most}。", error_cut: "上传中断。请重新选择文件。",
    error_used: "还有未完成的训练需要这个文件。",
    error_not_running: "它已经结束，或是在终端里启动的。",
    error_field: "服务器不接受：{text}", error_other: "其他原因：{text}",
  },
};

let language = "en";

/** The text of a key, with {name} filled in. */
export function t(key, values = {}) {
  return (TEXT[language][key] ?? key).replace(/\{(\w+)\}/g, (whole, name) => String(values[name] ?? whole));
}

/** Seconds as text of two digits or so; the units are those of both languages. */
export function duration(seconds) {
  if (seconds < 100) return `${Math.round(seconds)} s`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

/** The time of day in so many seconds. */
export function clock(seconds) {
  const format = { hour: "2-digit", minute: "2-digit" };
  return new Date(Date.now() + 1000 * seconds).toLocaleTimeString(document.documentElement.lang, format);
}

/** Bytes as text. */
export function size(bytes = 0) {
  const units = ["B", "KB", "MB", "GB"];
  const unit = Math.min(3, bytes < 1 ? 0 : Math.floor(Math.log10(bytes) / 3));
  return `${Number((bytes / 1000 ** unit).toPrecision(3))} ${units[unit]}`;
}

/** How often, as text. */
export const times = (n) => (n === 1 ? t("once") : t("times", { n: Number(n.toPrecision(2)) }));

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
