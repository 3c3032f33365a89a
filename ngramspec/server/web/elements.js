// Creates elements from text, never from markup.
"use strict";

const $ = (id) => document.getElementById(id);

function make(tag, name, parent, text = "") {
  const element = document.createElement(tag);
  if (name) element.className = name;
  element.textContent = text;
  parent.append(element);
  return element;
}

function button(text, parent, onclick, label = "") {
  const element = make("button", "", parent, text);
  element.type = "button";
  element.onclick = onclick;
  if (label) element.ariaLabel = label;
  return element;
}

function tell(text) {
  $("status").textContent = text;
}

function fail(text) {
  $("error").replaceChildren();
  if (text) make("p", "", $("error"), text);
  $("error").hidden = !text;
}

// Makes a change, and stays at the end of the conversation if it was visible.
function following(change) {
  const box = $("scroller");
  const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
  change();
  if (atEnd) box.scrollTop = box.scrollHeight;
}

async function copy(text) {
  try {
    if (navigator.clipboard) await navigator.clipboard.writeText(text);
    else copySelected(text);
    tell("Copied.");
  } catch {
    tell("Copying failed.");
  }
}

// Without HTTPS, pages from other machines have no access to the clipboard.
function copySelected(text) {
  const focused = document.activeElement;
  const box = make("textarea", "unseen", document.body);
  box.value = text;
  box.select();
  const done = document.execCommand("copy");
  box.remove();
  focused?.focus();
  if (!done) throw new Error("not copied");
}

const TAGS = new Set(
  "a blockquote br code div em h3 h4 h5 h6 hr li ol p pre s span strong table tbody td th thead tr ul".split(" ")
);

// Creates an element from its description: text, or [tag, attributes, ...children].
function build(node) {
  if (typeof node === "string") return node;
  const [tag, attributes, ...children] = node;
  const element = document.createElement(TAGS.has(tag) ? tag : "span");
  if (attributes.class) element.className = attributes.class;
  if (attributes.start !== undefined) element.start = attributes.start;
  if (/^(https?:\/\/|mailto:)/i.test(attributes.href)) {
    Object.assign(element, { href: attributes.href, target: "_blank", rel: "noopener noreferrer" });
  }
  if (tag === "pre") return boxed(element, children.map(build), attributes.language);
  element.append(...children.map(build));
  return element;
}

function boxed(pre, nodes, language) {
  const box = document.createElement("div");
  box.className = "code";
  const bar = make("div", "bar", box);
  make("span", "", bar, language);
  button("Copy", bar, () => copy(pre.textContent), "Copy code");
  box.append(pre);
  let line = null;
  for (const node of nodes) {
    line ??= make("span", "line", pre);
    line.append(node);
    if (!(node.textContent ?? node).endsWith("\n")) continue;
    // If the line is too long, its rest is indented a little more than its start.
    const indent = line.textContent.match(/^[ \t]*/)[0].replaceAll("\t", "    ").length;
    line.style.setProperty("--indent", `${Math.min(indent, 12) + 2}ch`);
    line = null;
  }
  return box;
}

// Breaks words in the tables that are otherwise wider than their place.
function fitTables(place) {
  for (const table of place.querySelectorAll("table")) {
    table.classList.remove("tight");
    table.classList.toggle("tight", table.offsetWidth > table.parentElement.clientWidth);
  }
}

const NOTHING = { elements: 0, units: 0, points: 0 };

// Markdown text as it grows. The server turns it into elements; those of finished blocks stay.
class Markdown {
  constructor(element) {
    this.element = element;
    this.work = null;
    this.over = NOTHING;
  }

  // Shows a text; `drafted` has spans in code points. `whole`: the text is complete and rendered again.
  show(text, drafted, whole) {
    if (whole && !this.element.firstChild) make("div", "plain", this.element, text);
    this.next = { text, drafted, whole };
    this.work ??= this.follow().finally(() => (this.work = null));
    return this.work;
  }

  async follow() {
    while (this.next) {
      const { text, drafted, whole } = this.next;
      this.next = null;
      const began = performance.now();
      await this.render(text, drafted, whole);
      // At most a tenth of the time is spent on rendering.
      const pause = Math.min(Math.max(100, 9 * (performance.now() - began)), 1000);
      if (!whole) await new Promise((resolve) => setTimeout(resolve, pause));
    }
  }

  async render(text, drafted, whole) {
    const from = whole ? NOTHING : this.over;
    // A number may become the next item of a list that would otherwise have ended.
    const rest = whole ? text : text.slice(from.units).replace(/\n\s*\d+$/, "");
    const marked = drafted.map((span) => span.map((at) => Math.max(0, at - from.points))).filter(([, end]) => end);
    let made = { blocks: [["div", { class: "plain" }, rest]], last: 0 };
    try {
      const response = await request("markdown", { text: rest, drafted: marked });
      if (response.ok) made = await response.json();
    } catch {
      // It is shown unchanged.
    }
    following(() => {
      while (this.element.childNodes.length > from.elements) this.element.lastChild.remove();
      this.element.append(...made.blocks.map(build));
      fitTables(this.element);
    });
    this.over = {
      elements: Math.max(this.element.childNodes.length - 1, 0),
      units: from.units + Array.from(rest).slice(0, made.last).join("").length,
      points: from.points + made.last,
    };
  }
}
