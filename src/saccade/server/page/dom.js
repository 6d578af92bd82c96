// Small helpers to build the page. Text is always set as text, never as markup.

export const at = (id) => document.getElementById(id);

export function make(tag, options = {}, ...children) {
  return fill(document.createElement(tag), options, children);
}

const SVG = "http://www.w3.org/2000/svg";
export function svg(tag, options = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), options, children);
}

function fill(node, options, children) {
  for (const [name, value] of Object.entries(options)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "text") node.textContent = value;
    else if (typeof value === "function") node.addEventListener(name, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

const ICONS = {
  attach: "M12 5v14M5 12h14",
  tune: "M4 7h9M17 7h3M4 17h3M11 17h9M15 4.500v5M9 14.500v5",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  menu: "M4 6h16M4 12h16M4 18h16",
  copy: "M9 9h10v11H9zM5 15V4h10",
  check: "M5 13l4 4 10-10",
  edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4",
  again: "M20 11a8 8 0 1 0-2.300 6.300M20 5v6h-6",
  remove: "M6 6l12 12M18 6L6 18",
  trash: "M4 7h16M9 7V4h6v3M6 7l1 13h10l1-13",
  plus: "M12 5v14M5 12h14",
  key: "M14 14l7-7M18 7l2 2M9 20a5 5 0 1 0 0-10 5 5 0 0 0 0 10z",
};

export function icon(name) {
  const path = svg("path", { d: ICONS[name] });
  const style = name === "stop" ? "glyph solid" : "glyph";
  return svg("svg", { viewBox: "0 0 24 24", class: style, "aria-hidden": "true" }, path);
}

export function iconButton(name, label, click) {
  const options = { type: "button", class: "icon", "aria-label": label, title: label, click };
  return make("button", options, icon(name));
}

export function announce(text) {
  at("announcer").textContent = text;
}

export function copyButton(label, text) {
  const button = iconButton("copy", label, async () => {
    const isCopied = await copy(text());
    announce(isCopied ? "Copied" : "This browser does not allow copying");
    if (!isCopied) return;
    button.replaceChildren(icon("check"));
    setTimeout(() => button.replaceChildren(icon("copy")), 1500);
  });
  return button;
}

/* Whether it was copied. The clipboard API exists only on secure origins, and people open this page at
   http://some-machine:8000, too. */
async function copy(text) {
  if (navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch { /* not allowed: the old way */ }
  }
  const area = make("textarea", { class: "hidden", readonly: true });
  area.value = text;
  const before = document.activeElement;
  document.body.append(area);
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  before?.focus();
  return isCopied;
}

export function ask({ title, text, value, action }) {
  /* A dialog with a text field if there is a value. Resolves to the text, true, or null if it was dismissed. */
  const dialog = at("ask");
  const field = value === undefined ? null : make("input", { "aria-labelledby": "ask-title", maxlength: 120 });
  if (field) field.value = value;
  const ok = make("button", { class: "main", text: action });
  const cancel = make("button", { type: "button", text: "Cancel", click: () => dialog.close() });
  const form = make("form", { method: "dialog" }, make("h2", { id: "ask-title", text: title }),
    text ? make("p", { class: "soft", text }) : null, field, make("div", { class: "row end" }, cancel, ok));
  return new Promise((done) => {
    let result = null;
    form.addEventListener("submit", (event) => {
      event.preventDefault();  // form-action is 'none'
      result = field ? field.value.trim() : true;
      dialog.close();
    });
    dialog.addEventListener("close", () => done(result), { once: true });
    dialog.replaceChildren(form);
    dialog.showModal();
    (field || ok).focus();
    field?.select();
  });
}
