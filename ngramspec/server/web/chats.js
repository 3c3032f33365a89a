// Conversations, stored in this browser and as files, which the /load command of `ngramspec chat` reads.
//
// A chat: {id, title, changed, system, messages}. A message: {role, content} as the server expects it, and in addition
// for a question: typed, files [{name, text}], from which its content was made;
// for an answer: reasoning_content, drafted and thoughts_drafted (spans in code points), note (shown below it).
"use strict";

const PREFIX = "ngramspec.chat.";

function newChat(system) {
  const id = `${Date.now().toString(36)}${Math.random().toString(36).slice(2, 8)}`;
  return { id, title: "", changed: Date.now(), system, messages: [] };
}

function titleOf(chat) {
  const { typed, files, content = "" } = chat.messages[0] ?? {};
  const text = typed?.trim() || files?.[0]?.name || content;
  const words = chat.title.trim() || firstWords(text.replace(FENCED, "")) || firstWords(text) || "Untitled";
  return Array.from(words).slice(0, 80).join("");
}

const FENCED = /^ *(`{3,}|~{3,})[^]*?(?:^ *\1|$(?![^]))/gm;

// Returns the first line with a letter or digit, without marks of Markdown; fences are not lines.
function firstWords(text) {
  const lines = text.split("\n").filter((line) => !/^ *(```|~~~)/.test(line));
  return lines.find((line) => /[\p{L}\p{N}]/u.test(line))?.replace(/^[\s>#*+-]+|\*\*|`/g, "").trim();
}

function loadChat(id) {
  try {
    return JSON.parse(localStorage.getItem(PREFIX + id));
  } catch {
    return null;
  }
}

function allChats() {
  const ids = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
  const found = ids.map((key) => loadChat(key.slice(PREFIX.length))).filter(Boolean);
  return found.sort((one, other) => other.changed - one.changed);
}

function saveChat(chat) {
  if (chat.messages.length) store(PREFIX + chat.id, chat);
  else deleteChat(chat.id);
}

function store(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
  } catch {
    fail("The browser's storage is full: export or delete some conversations.");
  }
}

function deleteChat(id) {
  localStorage.removeItem(PREFIX + id);
}

function download(name, data) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify(data, null, 1)], { type: "application/json" }));
  link.download = `${name.replace(/[^\p{L}\p{N} ._-]+/gu, "_").trim() || "chat"}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

function exported({ title, changed, system, messages }) {
  const first = system.trim() ? [{ role: "system", content: system }] : [];
  return { title, changed, messages: [...first, ...messages] };
}

// Parses the chats in a file, one or several.
function readChats(text) {
  const data = JSON.parse(text);
  return (data.conversations ?? [data]).map(({ title, changed, messages }) => {
    const read = messages.map(readMessage);
    const chat = newChat(read[0]?.role === "system" ? read.shift().content : "");
    if (typeof title === "string") chat.title = title;
    if (Number.isFinite(changed)) chat.changed = changed;
    if (read.some(({ role }, at) => role !== ["user", "assistant"][at % 2])) throw new TypeError("no turns");
    return { ...chat, messages: read };
  });
}

function readMessage({ role, content, ...more }) {
  if (typeof content !== "string") throw new TypeError("no text");
  const message = { role, content, reasoning_content: "", note: "" };
  for (const name of ["typed", "reasoning_content", "note"]) {
    if (typeof more[name] === "string") message[name] = more[name];
  }
  for (const name of ["drafted", "thoughts_drafted"]) {
    const spans = Array.isArray(more[name]) ? more[name] : [];
    message[name] = spans.filter((span) => span?.length === 2 && span.every(Number.isInteger));
  }
  const files = Array.isArray(more.files) ? more.files : [];
  message.files = files.filter((file) => typeof file?.name === "string" && typeof file.text === "string");
  return message;
}
