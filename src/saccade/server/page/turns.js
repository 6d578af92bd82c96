// How a conversation looks: questions with their images, answers as Markdown, errors where they happened.

import { copyButton, icon, iconButton, make } from "./dom.js";
import { figure, findShapes } from "./grounding.js";
import { markdown } from "./markdown.js";
import { showMedia } from "./media.js";
import { served, summary } from "./served.js";

export function userTurn(turn, { onEdit }) {
  const node = make("article", { class: "turn user", "aria-label": "You" });
  const media = (turn.media || []).map(showMedia);
  if (media.length) node.append(make("div", { class: "pictures" + (media.length > 1 ? " many" : "") }, ...media));
  if (turn.text) node.append(make("p", { class: "bubble", text: turn.text }));
  const large = (turn.media || []).filter((item) => item.isTooLarge);
  if (large.length) {
    const text = large.map((item) => item.name).join(", ") + ": too large to keep; gone when the page is left";
    node.append(make("p", { class: "note", text }));
  }
  node.append(make("div", { class: "actions" }, copyButton("Copy question", () => turn.text),
    iconButton("edit", "Edit question", () => edit(node, turn, onEdit))));
  return node;
}

/* The question becomes a text field; images stay. */
function edit(node, turn, onEdit) {
  const before = [...node.childNodes];
  const area = make("textarea", { "aria-label": "Edit question", rows: 3 });
  area.value = turn.text;
  const cancel = () => { node.replaceChildren(...before); node.querySelector(".actions button:last-child").focus(); };
  const form = make("form", { class: "editing", submit: (event) => {
    event.preventDefault();
    const text = area.value.trim();
    if (text || turn.media?.length) onEdit(text);
  } }, area, make("div", { class: "row end" }, make("button", { type: "button", text: "Cancel", click: cancel }),
    make("button", { class: "main", text: "Ask again" })));
  area.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { event.stopPropagation(); cancel(); }
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  node.replaceChildren(...before.filter((child) => child.matches(".pictures")), form);
  area.focus();
}

/* An answer. `show` draws what it is so far, `end` what belongs under a whole one. */
export function answerTurn(turn, { onAgain, onEdit, onKey, images, vision }) {
  const thinking = make("details", { class: "reasoning", hidden: true }, make("summary", { text: "Reasoning" }),
    make("div"));
  const body = make("div", { class: "markdown" }), foot = make("div", { class: "foot" });
  const node = make("article", { class: "turn assistant", "aria-label": "Answer" }, thinking, body, foot);
  const show = () => {
    const { reasoning, text } = parted(turn);
    thinking.hidden = !reasoning;
    thinking.lastChild.textContent = reasoning;
    thinking.firstChild.textContent = text || turn.isDone ? "Reasoning" : "Reasoning …";
    if (text) body.replaceChildren(...markdown(text));
    else body.replaceChildren(...(turn.isDone || reasoning ? [] : [dots()]));
  };
  const end = () => {
    node.removeAttribute("aria-busy");
    show();
    foot.replaceChildren(...footer());
  };
  const footer = () => {
    const parts = [];
    const [place, shapes] = places(turn.text, images(), vision());
    if (shapes.length) parts.push(figure(place, shapes));
    if (turn.error) parts.push(problem(turn.error, { onAgain, onEdit, onKey }));
    else if (!turn.text && !turn.stats?.stopped) parts.push(make("p", { class: "note", text: "The answer is empty." }));
    const actions = make("div", { class: "actions" });
    if (turn.text) actions.append(copyButton("Copy answer", () => turn.text));
    if (!turn.error) actions.append(iconButton("again", "Answer again", onAgain));
    if (turn.stats) actions.append(make("span", { class: "note stats", text: summary(turn.stats) }));
    return [...parts, actions, served(turn.passes)].filter(Boolean);
  };
  if (turn.isDone) end();
  else {
    node.setAttribute("aria-busy", "true");
    show();
  }
  return { node, show, end };
}

const dots = () => make("span", { class: "waiting", role: "img", "aria-label": "Waiting for the answer" });

/* A server without a parser for reasoning leaves its tags in the text. */
function parted(turn) {
  const [whole, inner] = /^\s*<think>([\s\S]*?)(?:<\/think>|$)/.exec(turn.text) || ["", ""];
  return { reasoning: (turn.reasoning || inner).trim(), text: turn.text.slice(whole.length) };
}

function places(text, images, vision) {
  const media = images.find((item) => item.kind === "image" && item.url);
  return media && text ? [media, findShapes(text, media, vision)] : [null, []];
}

function problem(error, { onAgain, onEdit, onKey }) {
  const box = make("div", { class: "problem", role: "alert" }, make("p", { text: error.message }));
  if (error.status === 401) {
    box.append(keyForm("Send the question again", onKey));
    return box;
  }
  box.append(make("div", { class: "row" },
    make("button", { type: "button", click: onAgain }, icon("again"), "Try again"),
    make("button", { type: "button", click: onEdit }, icon("edit"), "Edit question")));
  return box;
}

/* Asks for the API key in place. It is kept until the tab is closed. */
export function keyForm(action, onKey) {
  const field = make("input", {
    type: "password", class: "key", autocomplete: "off", required: true,
    "aria-label": "API key", placeholder: "API key",
  });
  return make("form", { class: "row key-form", submit: (event) => {
    event.preventDefault();
    if (field.value.trim()) onKey(field.value.trim());
  } }, icon("key"), field, make("button", { class: "main", text: action }),
    make("span", { class: "note", text: "kept until this tab is closed" }));
}
