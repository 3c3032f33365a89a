// The page: its views and controls.
"use strict";

const KEPT = "ngramspec.settings";
const FIELDS = ["system", ...NUMBERS, "json_schema"];

let chat = newChat("");
let running = null; // {abort, answer, before}: the answer in progress, and the chat without it
let editing = null; // index of the message that the text in the composer will replace
let files = []; // files attached to the next question
let presets = {};
let contextSize = 0;
let shown = []; // the messages in the log, each with its view

// ---------------------------------------------------------------- the conversation

// Creates the view of an answer.
class AnswerView {
  constructor(answer, at) {
    this.element = make("article", "", $("log"));
    this.element.ariaLabel = "Answer";
    this.details = make("details", "thoughts", this.element);
    make("summary", "", this.details, "Thoughts");
    this.details.ontoggle = () => fitTables(this.details);
    this.thoughts = new Markdown(make("div", "text", this.details));
    this.answer = new Markdown(make("div", "answer text", this.element));
    this.note = make("p", "note", this.element);
    const actions = make("div", "actions", this.element);
    button("Copy", actions, () => copy(answer.content), "Copy answer");
    button("Regenerate", actions, () => regenerate(at));
    button("Continue", actions, () => goOn()).classList.add("continue");
    this.show(answer, true);
  }

  show(answer, whole) {
    const { content, reasoning_content: thoughts } = answer;
    following(() => {
      this.details.hidden = !thoughts;
      this.note.textContent = answer.note;
    });
    const shown = [content && this.answer.show(content, answer.drafted, whole)];
    if (thoughts) shown.push(this.thoughts.show(thoughts, answer.thoughts_drafted, whole));
    return Promise.all(shown);
  }
}

class QuestionView {
  constructor(message, at) {
    this.element = make("div", "", $("log"));
    const box = make("div", "question", this.element);
    const files = make("ul", "files", box);
    for (const file of message.files ?? []) showAttached(file, make("li", "", files));
    const text = make("div", "text", box);
    text.dir = "auto";
    this.text = new Markdown(text);
    const actions = make("div", "actions", this.element);
    const typed = typedOf(message);
    if (typed.length > 2000 || typed.split("\n").length > 30) {
      box.classList.add("folded");
      const more = button("Show all", actions, () => (more.textContent = box.classList.toggle("folded") ? "Show all" : "Show less"));
    }
    button("Copy", actions, () => copy(typed), "Copy message");
    button("Edit", actions, () => edit(at));
    this.show(message);
  }

  show(message) {
    const typed = typedOf(message);
    // Markdown would lose the indentation of code that is not in a fence.
    const isLooseCode = /^(\t| {2})/m.test(typed) && !/^\s*(```|~~~|[-*+] |\d+[.)] )/m.test(typed);
    if (isLooseCode) Object.assign(this.text.element, { className: "plain text", textContent: typed });
    else this.text.show(typed, [], true);
  }
}

const typedOf = ({ typed, content }) => typed ?? content;

// Shows the name of an attached file, which opens its text.
function showAttached(file, parent) {
  const box = make("details", "", parent);
  make("summary", "", box, file.name);
  const text = new Markdown(make("div", "text", box));
  box.ontoggle = () => text.element.firstChild || text.show(fenced(file), [], true);
}

// Shows the conversation; unchanged parts stay in place.
function show() {
  let same = 0;
  while (same < shown.length && shown[same].message === chat.messages[same]) same++;
  for (const { view } of shown.splice(same)) view.element.remove();
  for (const [at, message] of chat.messages.entries()) {
    if (at < same) continue;
    const view = message.role === "user" ? new QuestionView(message, at) : new AnswerView(message, at);
    shown.push({ message, view });
  }
  $("empty").hidden = shown.length > 0;
  $("scroller").scrollTop = $("scroller").scrollHeight;
  list();
}

function open(next) {
  running?.work.abort();
  running = null;
  busy(false);
  cancelEdit();
  fail("");
  chat = next;
  $("system").value = chat.system;
  show();
  if (!wide.matches) listed(false);
  $("question").focus();
}

// If later messages would be lost, a copy of the conversation is continued instead.
function cut(at) {
  const kept = chat.messages.slice(0, at);
  const forked = chat.messages.length > at + 2;
  return { ...chat, ...(forked && { id: newChat("").id }), messages: kept, changed: Date.now() };
}

function regenerate(at) {
  answer(cut(at), newAnswer());
}

function goOn() {
  const last = structuredClone(chat.messages.at(-1));
  answer({ ...chat, messages: chat.messages.slice(0, -1), changed: Date.now() }, last);
}

const newAnswer = () => ({ role: "assistant", content: "", reasoning_content: "", drafted: [], thoughts_drafted: [], note: "" });

// Lets the model write or continue the answer at the end of a chat. If nothing arrives, the chat is restored, and
// the question is in the composer again.
async function answer(asked, written, question = null) {
  if (running) return;
  const before = chat;
  const length = sizeOf(written);
  const mine = (chat = { ...asked, messages: [...asked.messages, written] });
  const mark = (running = { work: new AbortController(), written, before, question });
  cancelEdit();
  fail("");
  busy(true);
  if (!loadChat(mine.id)) saveChat(asked);
  show();
  const { view } = shown.at(-1);
  view.element.ariaBusy = "true";
  tell("The model is answering.");
  const ending = await receive(length ? mine : asked, written, mark.work.signal, () => view.show(written, false));
  const here = running === mark;
  const came = ending.done || sizeOf(written) > length;
  if (loadChat(mine.id)) {
    // The chat has not been deleted in the meantime.
    if (!came) deleteChat(mine.id);
    saveChat(came ? mine : before);
  }
  if (ending.fault) contextSize = 0; // the server may be another one when it responds again
  if (!here) return list();
  running = null;
  busy(false);
  fail(ending.fault);
  tell(ending.done ? "The answer is complete." : "The answer was interrupted.");
  if (ending.keyless) settings(true, $("key"));
  if (!came) return retract(before, question);
  list();
  if (!contextSize) identify();
  await view.show(written, true);
  view.element.ariaBusy = "false";
}

const sizeOf = ({ content, reasoning_content: thoughts }) => content.length + thoughts.length;

// Lets an unanswered question be asked again.
function retract(before, question) {
  chat = { ...before, title: chat.title, system: chat.system };
  show();
  if (!question || $("question").value) return;
  $("question").value = question.typed;
  files = question.files;
  showFiles();
}

function busy(yes) {
  $("send").hidden = yes;
  $("stop").hidden = !yes;
  document.body.classList.toggle("busy", yes);
}

// ---------------------------------------------------------------- questions

// Builds the message for the model: the files, each in fences that do not occur in it, then the typed text.
function contentOf(typed, files) {
  const parts = files.map((file) => `${file.name}\n${fenced(file)}`);
  return [...parts, typed].filter((part) => part.trim()).join("\n\n");
}

// Returns the text of a file as code in Markdown; its language is the file's extension.
function fenced({ name, text }) {
  const ticks = Math.max(2, ...(text.match(/`+/g) ?? []).map((found) => found.length));
  const fence = "`".repeat(ticks + 1);
  return `${fence}${name.match(/\.(\w+)$/)?.[1] ?? ""}\n${text.replace(/\n$/, "")}\n${fence}`;
}

function ask() {
  const typed = $("question").value;
  const content = contentOf(typed, files);
  if (running || !content) return;
  const question = { role: "user", content, typed, files };
  const next = editing === null ? { ...chat, changed: Date.now() } : cut(editing);
  $("question").value = "";
  files = [];
  showFiles();
  $("question").focus();
  answer({ ...next, messages: [...next.messages, question] }, newAnswer(), question);
}

function edit(at) {
  if (running) return;
  editing = at;
  files = chat.messages[at].files ?? [];
  showFiles();
  $("question").value = typedOf(chat.messages[at]);
  $("editing").hidden = false;
  $("question").focus();
}

function cancelEdit() {
  if (editing === null) return;
  editing = null;
  files = [];
  showFiles();
  $("question").value = "";
  $("editing").hidden = true;
}

async function attach(chosen) {
  for (const file of chosen) {
    try {
      const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
      if (text.includes("\0")) throw new TypeError("binary");
      files = [...files, { name: file.name, text }];
    } catch {
      fail(`${file.name} is not a UTF-8 text file.`);
    }
  }
  showFiles();
  $("question").focus();
}

function showFiles() {
  $("files").replaceChildren();
  for (const file of files) {
    const item = make("li", "", $("files"), file.name);
    const remove = () => {
      files = files.filter((one) => one !== file);
      showFiles();
      $("question").focus();
    };
    button("×", item, remove, `Remove ${file.name}`);
  }
}

// ---------------------------------------------------------------- the list of conversations

const wide = matchMedia("(min-width: 60rem)");

function listed(yes) {
  $("chats").hidden = !yes;
  $("menu").ariaExpanded = String(yes);
}

function list() {
  const wanted = $("filter").value.toLowerCase();
  const found = allChats().filter(
    (one) => `${one.title}\n${one.messages.map(({ content }) => content).join("\n")}`.toLowerCase().includes(wanted)
  );
  $("list").replaceChildren();
  for (const one of found) {
    const item = make("li", "", $("list"));
    const opener = button(titleOf(one), item, () => open(loadChat(one.id) ?? one));
    opener.title = titleOf(one);
    if (one.id !== chat.id) continue;
    opener.ariaCurrent = "true";
    const actions = make("div", "tools", item);
    button("Rename", actions, () => rename(one));
    button("Export", actions, () => download(titleOf(one), exported(one)));
    button("Delete", actions, () => discard(one));
  }
}

function rename(one) {
  const title = prompt("Name of the conversation", titleOf(one));
  if (title === null) return;
  chat.title = title;
  saveChat({ ...one, title });
  list();
}

function discard(one) {
  if (!confirm(`Delete “${titleOf(one)}”?`)) return;
  open(newChat($("system").value));
  deleteChat(one.id);
  list();
}

async function imports(chosen) {
  for (const file of chosen) {
    try {
      readChats(await file.text()).forEach(saveChat);
    } catch {
      fail(`${file.name} contains no conversation.`);
    }
  }
  list();
}

// ---------------------------------------------------------------- settings

function settings(open, focus = null) {
  $("settings").hidden = !open;
  $("options").ariaExpanded = String(open);
  focus?.focus();
}

function keep() {
  const fields = Object.fromEntries(FIELDS.map((id) => [id, $(id).value]));
  store(KEPT, { fields, presets, green: $("green").checked });
  sessionStorage.setItem("ngramspec.key", $("key").value);
}

function recall() {
  let kept = {};
  try {
    kept = JSON.parse(localStorage.getItem(KEPT)) ?? {};
  } catch {
    // Treated as missing.
  }
  for (const id of FIELDS) $(id).value = kept.fields?.[id] ?? "";
  presets = kept.presets ?? {};
  $("green").checked = kept.green ?? false;
  $("key").value = sessionStorage.getItem("ngramspec.key") ?? "";
  $("question").value = sessionStorage.getItem("ngramspec.question") ?? "";
  chat = loadChat(sessionStorage.getItem("ngramspec.open")) ?? newChat($("system").value);
  $("system").value = chat.system;
  coloured();
  showPresets();
}

function coloured() {
  document.body.classList.toggle("green", $("green").checked);
}

function showPresets() {
  const text = $("system").value;
  $("preset").replaceChildren();
  make("option", "", $("preset"), "Saved messages …").value = "";
  for (const name of Object.keys(presets).sort()) {
    const option = make("option", "", $("preset"), name);
    option.selected = presets[name] === text;
  }
}

function changeSystem() {
  chat.system = $("system").value;
  if (!running) saveChat(chat);
  showPresets();
  keep();
}

function savePreset() {
  const name = prompt("Name of this system message", $("preset").value)?.trim();
  if (!name) return;
  presets[name] = $("system").value;
  showPresets();
  keep();
}

function deletePreset() {
  delete presets[$("preset").value];
  showPresets();
  keep();
}

// Shows the model and the settings of the server.
async function identify() {
  const [models, props] = await Promise.all(["v1/models", "props"].map((path) => request(path).catch(() => null)));
  const loading = "Loading the model …";
  if (models?.ok && $("model").textContent === loading) fail(""); // what was asked too early can be sent now
  if (models?.status === 503) setTimeout(identify, 2000);
  $("model").textContent = models?.status === 503 ? loading : "";
  $("context").textContent = "";
  if (!models?.ok || !props?.ok) return;
  const { id, meta } = (await models.json()).data[0];
  contextSize = meta.n_ctx;
  $("model").textContent = $("model").title = id;
  $("context").textContent = `context ${contextSize}`;
  const { params } = (await props.json()).default_generation_settings;
  for (const name of NUMBERS.slice(0, -2)) $(name).placeholder = params[name];
}

// ---------------------------------------------------------------- controls

$("composer").onsubmit = (event) => {
  event.preventDefault();
  ask();
};
$("question").onkeydown = (event) => {
  if (event.key === "ArrowUp" && !$("question").value) {
    const at = chat.messages.findLastIndex(({ role }) => role === "user");
    if (at >= 0) edit(at);
  } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    $("composer").requestSubmit();
  } else return;
  event.preventDefault();
};
document.onkeydown = (event) => {
  if (event.key !== "Escape") return;
  if (running) running.work.abort();
  else if (editing !== null) cancelEdit();
  else if (!wide.matches && !$("chats").hidden) {
    listed(false);
    $("menu").focus();
  } else if (!$("settings").hidden) settings(false, $("options"));
};
$("stop").onclick = () => {
  running?.work.abort();
  $("question").focus();
};
$("cancel").onclick = () => {
  cancelEdit();
  $("question").focus();
};
$("new").onclick = () => open(newChat($("system").value));
$("menu").onclick = () => {
  listed($("chats").hidden);
  if (!wide.matches && !$("chats").hidden) $("filter").focus();
};
$("chat").onpointerdown = (event) => {
  if (!wide.matches && event.target !== $("menu")) listed(false);
};
$("options").onclick = () => settings($("settings").hidden, $("system"));
$("green").onchange = () => {
  coloured();
  keep();
};
for (const [by, input, take] of [["attach", "attached", attach], ["import", "imported", imports]]) {
  $(by).onclick = () => $(input).click();
  $(input).onchange = async () => {
    await take([...$(input).files]);
    $(input).value = "";
  };
}
$("export").onclick = () => download("conversations", { conversations: allChats().map(exported) });
$("filter").oninput = list;
$("preset").onchange = () => {
  $("system").value = presets[$("preset").value] ?? "";
  changeSystem();
};
$("save-preset").onclick = savePreset;
$("delete-preset").onclick = deletePreset;
$("system").onchange = changeSystem;
for (const id of FIELDS.slice(1)) $(id).onchange = keep;
$("key").onchange = () => {
  keep();
  identify();
  for (const { message, view } of shown) view.show(message, true);
};
const held = (event) => event.dataTransfer?.types.includes("Files");
document.ondragover = (event) => {
  if (held(event)) event.preventDefault();
};
document.ondrop = (event) => {
  if (!held(event)) return;
  event.preventDefault();
  attach([...event.dataTransfer.files]);
};
$("question").onpaste = (event) => {
  if (!event.clipboardData.files.length) return;
  event.preventDefault();
  attach([...event.clipboardData.files]);
};
wide.onchange = () => listed(wide.matches);
new ResizeObserver(() => fitTables($("log"))).observe($("scroller"));
addEventListener("storage", list);
addEventListener("pagehide", () => {
  keep();
  let [left, draft] = [chat, $("question").value];
  if (running) {
    const { written, before, question } = running;
    written.note += " · interrupted";
    if (!sizeOf(written)) {
      deleteChat(chat.id);
      left = before;
      draft ||= question?.typed ?? "";
    }
    saveChat(left);
  }
  sessionStorage.setItem("ngramspec.open", left.id);
  sessionStorage.setItem("ngramspec.question", draft);
});

recall();
listed(wide.matches);
show();
identify();
