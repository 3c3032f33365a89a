// Contrast between each kind of text on the page and its background, as WCAG defines it.
(() => {
  const kinds = {
    question: ".question",
    text: ".answer p",
    drafted: ".answer p .drafted",
    draftedCode: "pre .drafted",
    code: "pre",
    inlineCode: "p code",
    keyword: "pre .keyword",
    string: "pre .string",
    number: "pre .number",
    comment: "pre .comment",
    name: "pre .name",
    quote: "blockquote p",
    heading: "th",
    note: ".note",
    bar: ".bar span",
    actions: ".actions button",
    listed: "#list li > button",
    tools: ".tools button",
    label: "#settings label",
    send: "#send",
    model: "#model",
    legend: "#legend",
  };
  const numbers = (colour) => colour.match(/[\d.]+/g).map(Number);
  const linear = (value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  const brightness = ([red, green, blue]) => {
    const [r, g, b] = [red, green, blue].map((value) => linear(value / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    const colour = numbers(getComputedStyle(element).backgroundColor);
    return colour[3] === 0 ? behind(element.parentElement) : colour;
  };
  const found = {};
  for (const [kind, selector] of Object.entries(kinds)) {
    const element = document.querySelector(selector);
    if (!element) continue;
    const pair = [numbers(getComputedStyle(element).color), behind(element)].map(brightness);
    found[kind] = (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
  }
  return found;
})()
