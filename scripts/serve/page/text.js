// Every word of the page in English and Chinese.

const TEXT = {
  en: {
    title: "MiniMind", chat: "Chat", training: "Training", newChat: "New chat", conversations: "Conversations",
    menu: "Menu", close: "Close", theme: "Light or dark", language: "中文", languageLabel: "Switch to Chinese",
    settings: "Settings", model: "Model", send: "Send", stop: "Stop", edit: "Edit", copy: "Copy", regenerate: "Answer again",
    rename: "Rename", remove: "Delete", undo: "Undo", cancel: "Cancel", save: "Save", exportOne: "Export this chat", exportAll: "Export all",
    messageLabel: "Your message", placeholder: "Write a message",
    placeholderText: "Write a beginning; the model continues it",
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
    savePage: "Save as a page to send", makingPage: "Making a page of {name} and asking it a few questions …",
    pageMade: "{name}.html, {size}: open it by a double click. It also works offline.", pageFailed: "The page could not be made: {text}",
    compare: "Second model", compareWith: "Compare with …",
    storageFull: "The browser’s storage is full. Export chats and delete some, or new messages will be lost.",
    temperature: "Temperature", temperatureHelp: "0 always takes the likeliest word; higher is more varied",
    top_p: "Top p", top_pHelp: "Chooses among the likeliest words that together have this probability",
    top_k: "Top k", top_kHelp: "Chooses among this many of the likeliest words; 0: among all",
    repetition_penalty: "Repetition penalty", repetition_penaltyHelp: "Above 1 the model repeats itself less, prompt included",
    frequency_penalty: "Frequency penalty", frequency_penaltyHelp: "Above 0 words become less likely each time they are written",
    presence_penalty: "Presence penalty", presence_penaltyHelp: "Above 0 words become less likely once they are written",
    max_tokens: "Longest answer", max_tokensHelp: "In tokens",
    seed: "Seed", seedHelp: "The same seed gives the same answer again",
    system: "System prompt", systemHelp: "Is put before every conversation",
    thinking: "Reason before answering", tools: "Tools", toolsHelp: "A JSON list of functions that the model may call",
    toolsBad: "The tools are not a valid JSON list", auto: "default", reset: "Reset to defaults",
    keyTitle: "This server needs a key", keyHelp: "Open the link that the server printed in its window: it holds the key.",
    keyLabel: "API key", keyWrong: "This key is wrong.", errorKey: "The server needs a key.", errorBusy: "The server is busy. Try again in {seconds} seconds.",
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
    dropFiles: "Drop files or a folder here, or choose files",
    fileKinds: "Text and conversations: .txt, .docx, .epub, .pdf, .html, .srt, .jsonl, .json, .csv or .parquet. They stay on this machine.",
    uploading: "{name}: {percent} % of {size}",
    file_text: "{name}: text to read, {size} · {n} documents", file_chat: "{name}: {n} conversations",
    file_text_1: "{name}: text to read, {size}", file_chat_1: "{name}: one conversation",
    tryExample: "Or try it with an example: an invented valley and its people",
    newName: "The new name of “{name}”:", deleteAsk: "Delete “{name}”? It is moved to the folder out/.deleted.",
    shareOfText: " · {percent} % of the text", shareOfChats: " · {percent} % of the conversations",
    showFirst: "Show the first {n}", showFirst_1: "Show it", removeFile: "Remove",
    willDoBoth: "It reads the text, then learns from the conversations how to answer.",
    willContinue: "It will continue texts. To chat, add conversations.",
    willReadChats: "It reads the conversations as text, then learns from them how to answer.",
    modelName: "Name", howLong: "How long may it take?",
    hours_0: "10 minutes", hours_1: "1 hour", hours_2: "a night (8 h)", otherHours: "other, in hours:",
    modelSize: "Size", planChooses: "the plan chooses", layers_1: "1 layer, {w} wide", layers: "{d} layers, {w} wide", makePlan: "Make a plan",
    skipBad: "Skip records that cannot be used (at most 10 %)",
    state_form: "new", state_new: "new", state_planning: "planning", state_planned: "the plan is made", state_training: "training",
    state_saving: "saving", state_stopped: "stopped", state_cut: "ended", state_failed: "failed", state_ready: "ready",
    planningHelp: "Looking at the data and timing models on this machine. About a minute, more for large files.",
    planModel: "{kind} of {weights} weights ({shape}).", kind_0: "A very small model", kind_1: "A small model", kind_2: "A model",
    planReads: "It reads the text {times}",
    planReadsPart: "It reads {percent} % of the text", planThen: ", then the conversations {times}", fullStop: ".",
    once: "once", times: "{n} times",
    planTime: "It takes about {time} and is done at {clock}.",
    limit_data: "More time would not help: the text is short.", limit_hours: "More time would make it better.",
    limit_memory: "More memory would allow a larger model.", limit_size: "",
    planNeeds: "It needs {a} of memory and {b} of disk; {c} and {e} are free.",
    unwise: "Before you start:", whatReading: "Reading", whatAnswering: "Answering",
    unwise_more_time: "{what}: only {updates} updates, which teach little. Give it more time.",
    unwise_more_data: "{what}: only {updates} updates, which teach little. Add more text or conversations.",
    unwise_few_tokens: "The text is short ({tokens} pieces of words): expect its words and its tone, but hardly a sentence that makes sense. Add more text.",
    unwise_few_conversations: "{conversations} conversations teach a manner of answering, but no knowledge. Put what it shall know into the text.",
    unwise_leaks: "Some questions of the test are nearly the same as questions that it learns from, so the result will look too good. Remove what stands there twice.",
    unwise_disk: "The disk is too full: {need} GB are needed, {free} GB are free. Make room first.",
    startJob: "Start", changePlan: "Change", inTerminal: "The same in a terminal",
    stageReading: "Reading the text, {i} of {n}", stageAnswering: "Learning to answer, {i} of {n}", writingReport: "Writing the report",
    progress: "{u} of {v} updates · about {left} left, done at {clock} (planned: {planned})",
    starting: "Starting; the first figures come within a minute.",
    heldOut: "Held-out loss {now}, at the start {first}.", itWrites: "It writes: “{prompt}” → “{answer}”",
    canClose: "You can close this page and stop the server: the training continues.",
    stopAndSave: "Stop and save", saving: "Finishing this update and saving …",
    slowSave: "This takes longer than usual.", endAtOnce: "End at once",
    endAtOnceHelp: "The updates after the last checkpoint will be repeated.",
    noNews: "Nothing new for {time}. See the log.", showLog: "Show the log", goOn: "Go on",
    wasStopped: "Stopped at update {u} of {v}. Nothing is lost.",
    wasEnded: "Stopped. Nothing is lost.", wasBetween: "Stopped between reading and answering. Nothing is lost.",
    planUnfinished: "The plan of “{name}” was not finished. Make it again.",
    wasCut: "It ended without saying why: power, memory, or somebody killed it. It can continue from its last checkpoint.",
    ready: "Ready.", answersRight: "It answers {right} of {asked} questions right that it had not seen.", continuesTexts: "It continues texts.",
    notYet: "To make it better: a longer training, a text that says each thing in several ways, or more conversations.",
    inFigures: "In figures", chatWithIt: "Chat with it", downloadReport: "Download the report",
    error_memory: "Out of memory. Close other programs and go on, or plan a smaller model.",
    error_disk: "The disk is full: {free} are free. Make room, then go on.",
    error_room: "{need} of disk are needed, {free} are free.",
    error_not_utf8: "Not UTF-8. Save the file as UTF-8 (Notepad: Save as, Encoding) and choose it again.",
    error_bad_record: "{file}, line {line}: {why}. Correct it, or skip such records.",
    error_too_little: "Too little text: none could be held out to measure the progress. Add more.",
    error_hours: "The model would learn nothing in this time. Give it more.",
    error_busy: "“{name}” is being trained, about {time} left. One at a time: stop it, or wait.",
    error_exists: "A model of this name exists already.",
    error_kind: "{file}: save it as plain text (.txt, UTF-8) first.", error_not_text: "{file}: this is not text.", error_no_record: "{file} contains nothing to read.",
    error_too_large: "The file is larger than {most}.", error_cut: "The upload was interrupted. Choose the file again.",
    error_no_file: "The file no longer exists.",
    error_used: "An unfinished training needs this file.",
    error_not_running: "It has ended already, or was started in a terminal.",
    error_not_ready: "Only a model that is ready can be renamed.", error_not_moved: "Its folder cannot be moved.",
    error_not_started: "It cannot be started: its folder cannot be written, or the disk is full.",
    error_not_planned_here: "run.sh is not as plan.py wrote it here. Read it, then start it in a terminal: bash run.sh",
    error_too_much: "{file} is damaged, or its records are too large: it takes more than {most} of memory or {seconds} s to look at. Write it again, as JSON Lines.",
    seconds_: "{n} seconds", minute: "a minute", minutes: "{n} minutes", hour: "an hour", hours: "{n} hours",
    thousand: "{n} thousand", million: "{n} million", billion: "{n} billion",
    error_field: "The server does not accept this.", error_field_hours: "Between 0.02 and 168 hours (a week).",
    error_field_name: "A name has letters, digits, blanks and dashes.", error_other: "It cannot go on. The reason is in the log.",
  },
  zh: {
    title: "MiniMind", chat: "对话", training: "训练", newChat: "新对话", conversations: "对话列表",
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
    savePage: "保存为可发送的页面", makingPage: "正在制作 {name} 的页面，并向它提几个问题……",
    pageMade: "{name}.html，{size}：双击即可打开，离线也能用。", pageFailed: "无法制作页面：{text}",
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
    keyTitle: "服务器需要密钥", keyHelp: "请打开服务器启动时打印的链接，密钥就在链接里。",
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
    dropFiles: "把文件或文件夹拖到这里，或选择文件",
    fileKinds: "文本和对话：.txt、.docx、.epub、.pdf、.html、.srt、.jsonl、.json、.csv 或 .parquet。文件只留在这台机器上。",
    uploading: "{name}：{size} 的 {percent}%",
    file_text: "{name}：用来阅读的文本，{size} · {n} 篇", file_chat: "{name}：{n} 个对话",
    file_text_1: "{name}：用来阅读的文本，{size}", file_chat_1: "{name}：1 个对话",
    tryExample: "或者用一个例子试试：虚构的山谷和那里的人",
    newName: "“{name}”的新名称：", deleteAsk: "删除“{name}”？它会移到文件夹 out/.deleted。",
    shareOfText: " · 占文本的 {percent}%", shareOfChats: " · 占对话的 {percent}%",
    showFirst: "查看前 {n} 条", showFirst_1: "查看内容", removeFile: "移除",
    willDoBoth: "先阅读文本，再从对话中学习如何回答。",
    willContinue: "它会续写文本。想要聊天，请再加入对话。",
    willReadChats: "先把对话当作文本阅读，再从中学习如何回答。",
    modelName: "名称", howLong: "最多用多长时间？",
    hours_0: "10 分钟", hours_1: "1 小时", hours_2: "一晚（8 小时）", otherHours: "其他（小时）：",
    modelSize: "大小", planChooses: "由计划决定", layers_1: "1 层，宽 {w}", layers: "{d} 层，宽 {w}", makePlan: "制定计划",
    skipBad: "跳过无法使用的记录（至多 10%）",
    state_form: "新建", state_new: "新建", state_planning: "正在制定计划", state_planned: "计划已完成", state_training: "正在训练",
    state_saving: "正在保存", state_stopped: "已停止", state_cut: "已结束", state_failed: "失败", state_ready: "完成",
    planningHelp: "正在查看数据并在这台机器上测量速度。约一分钟，文件大时更久。",
    planModel: "{kind}，{weights}个权重（{shape}）。", kind_0: "很小的模型", kind_1: "小模型", kind_2: "模型",
    planReads: "文本读 {times}",
    planReadsPart: "读文本的 {percent}%", planThen: "，对话读 {times}", fullStop: "。",
    once: "1 遍", times: "{n} 遍",
    planTime: "大约需要 {time}，{clock} 完成。",
    limit_data: "更多时间没有用：文本不够长。", limit_hours: "时间更长，效果会更好。",
    limit_memory: "内存更大，模型就可以更大。", limit_size: "",
    planNeeds: "需要内存 {a}、磁盘 {b}；可用 {c} 和 {e}。",
    unwise: "开始之前：", whatReading: "阅读", whatAnswering: "回答",
    unwise_more_time: "{what}：只有 {updates} 次更新，学不到多少。请给它更多时间。",
    unwise_more_data: "{what}：只有 {updates} 次更新，学不到多少。请增加文本或对话。",
    unwise_few_tokens: "文本很短（{tokens} 个词片）：会学到其中的词语和语气，但很难写出有意义的句子。请增加文本。",
    unwise_few_conversations: "{conversations} 个对话只能教会回答的方式，教不了知识。要它知道的内容，请写在文本里。",
    unwise_leaks: "测试用的部分问题与学习用的几乎相同，结果会显得过好。请删去重复的对话。",
    unwise_disk: "磁盘空间不足：需要 {need} GB，可用 {free} GB。请先腾出空间。",
    startJob: "开始", changePlan: "修改", inTerminal: "在终端里做同样的事",
    stageReading: "阅读文本，第 {i} 步，共 {n} 步", stageAnswering: "学习回答，第 {i} 步，共 {n} 步", writingReport: "生成报告",
    progress: "{v} 次更新中的第 {u} 次 · 约剩 {left}，{clock} 完成（计划：{planned}）",
    starting: "正在启动，一分钟内出现第一批数据。",
    heldOut: "验证损失 {now}，开始时 {first}。", itWrites: "模型写道：“{prompt}”→“{answer}”",
    canClose: "可以关闭此页面，也可以停止服务器：训练会继续。",
    stopAndSave: "停止并保存", saving: "正在完成这次更新并保存……",
    slowSave: "用时比平时长。", endAtOnce: "立即结束",
    endAtOnceHelp: "最近检查点之后的部分会重新训练。",
    noNews: "已有 {time} 没有消息。详情见日志。", showLog: "查看日志", goOn: "继续",
    wasStopped: "已停在第 {u} 次更新（共 {v} 次），没有丢失任何进度。",
    wasEnded: "已停止，没有丢失任何进度。", wasBetween: "已在阅读与学习回答之间停止，没有丢失任何进度。",
    planUnfinished: "“{name}”的计划没有完成，请重新制定。",
    wasCut: "它没有说明原因就结束了：断电、内存不足或被终止。可从最近的检查点继续。",
    ready: "完成。", answersRight: "{asked} 个它没有见过的问题，答对 {right} 个。", continuesTexts: "它会续写文本。",
    notYet: "想让它更好：延长训练，用多种说法陈述同一内容的文本，或增加对话。",
    inFigures: "用数字说明", chatWithIt: "和它聊天", downloadReport: "下载报告",
    error_memory: "内存不足。请关闭其他程序后继续，或计划一个更小的模型。",
    error_disk: "磁盘已满：可用 {free}。请腾出空间后继续。",
    error_room: "需要磁盘 {need}，可用 {free}。",
    error_not_utf8: "不是 UTF-8。请另存为 UTF-8（记事本：另存为 → 编码），再选一次。",
    error_bad_record: "{file} 第 {line} 行：{why}。请修改，或跳过这样的记录。",
    error_too_little: "文本太少，无法留出一部分检查学习效果。请增加文本。",
    error_hours: "这点时间学不到东西。请给它更多时间。",
    error_busy: "“{name}”正在训练，约剩 {time}。一次只能训练一个：请停止它或等待。",
    error_exists: "已经有同名的模型。",
    error_kind: "{file}：请先另存为纯文本（.txt，UTF-8）。", error_not_text: "{file}：这不是文本。", error_no_record: "{file} 里没有可读的内容。",
    error_too_large: "文件超过 {most}。", error_cut: "上传中断。请重新选择文件。",
    error_no_file: "文件已经不在了。",
    error_used: "还有未完成的训练需要这个文件。",
    error_not_running: "它已经结束，或是在终端里启动的。",
    error_not_ready: "只有训练完成的模型可以改名。", error_not_moved: "它的文件夹不能移动。",
    error_not_started: "无法启动：它的文件夹不能写入，或者磁盘已满。",
    error_not_planned_here: "run.sh 与 plan.py 在这里写出的不一致。请先阅读它，再在终端中启动：bash run.sh",
    error_too_much: "{file} 已损坏，或者记录太大：查看它需要超过 {most} 内存或 {seconds} 秒。请重新写成 JSON Lines。",
    seconds_: "{n} 秒", minute: "1 分钟", minutes: "{n} 分钟", hour: "1 小时", hours: "{n} 小时",
    thousand: "{n} 千", million: "{n} 万", billion: "{n} 亿",
    error_field: "服务器不接受这些内容。", error_field_hours: "请输入 0.02 到 168 小时（一周）。",
    error_field_name: "名称由字母、汉字、数字、空格和短横线组成。", error_other: "无法继续。原因写在日志里。",
  },
};

let language = "en";

/** The text of a key, with {name} filled in. */
export function t(key, values = {}) {
  return (TEXT[language][key] ?? key).replace(/\{(\w+)\}/g, (whole, name) => String(values[name] ?? whole));
}

/** Seconds as a short text. */
export function duration(seconds) {
  if (seconds < 50) return t("seconds_", { n: Math.round(seconds) });
  const minutes = Math.round(seconds / 60);
  if (minutes < 90) return minutes > 1 ? t("minutes", { n: minutes }) : t("minute");
  const hours = Number((seconds / 3600).toFixed(1));
  return hours > 1 ? t("hours", { n: hours }) : t("hour");
}

/** A large number as text of two digits, in thousands and millions, in Chinese in 万 and 亿. */
export function rough(n) {
  const steps = language === "zh" ? [[1e8, "billion"], [1e4, "million"]] : [[1e9, "billion"], [1e6, "million"], [1e3, "thousand"]];
  const [unit, name] = steps.find(([least]) => n >= least) ?? [1, ""];
  const digits = Number((n / unit).toPrecision(2)).toLocaleString("en");
  return name ? t(name, { n: digits }) : digits;
}

/** The time of day this many seconds from now. */
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

/** Choose the language, and set the texts of the elements that name one. Listeners of `language` redraw the rest. */
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
