// The list of conversations: open, rename, delete.

import { ask, at, icon, iconButton, make } from "./dom.js";
import * as store from "./store.js";

let handlers = null, isBroken = false;

export function setUp(given) {
  handlers = given;
  at("menu").append(icon("menu"));
  at("new").append(icon("plus"), "New chat");
  at("menu").onclick = () => toggle(!document.body.classList.contains("with-history"));
  at("new").onclick = () => { toggle(false); handlers.onNew(); };
  at("forget").onclick = async () => {
    const text = "They exist only in this browser.";
    const yes = await ask({ title: "Delete all conversations?", text, action: "Delete all" });
    if (!yes) return;
    await store.remove((await store.list()).map((talk) => talk.id));
    handlers.onNew();
    await show();
  };
  document.addEventListener("pointerdown", (event) => {
    if (!event.target.closest("#history, #menu")) toggle(false);
  });
}

export function toggle(isOpen) {
  const was = document.body.classList.contains("with-history");
  document.body.classList.toggle("with-history", isOpen);
  at("menu").setAttribute("aria-expanded", String(isOpen));
  if (isOpen) at("new").focus();
  else if (was && at("history").contains(document.activeElement)) at("menu").focus();
}

export async function save(talk) {
  if (isBroken) return;
  try {
    await store.save(talk);
  } catch (error) {
    const isFull = error?.name === "QuotaExceededError";
    if (!isFull) isBroken = true;
    at("kept").textContent = isFull ? "This browser's storage is full: the newest messages are not kept."
      : "This browser keeps no conversations here: they end with the page.";
  }
  await show();
}

export async function show() {
  if (isBroken) return;
  let talks = [];
  try {
    talks = await store.list();
  } catch {
    isBroken = true;
    at("kept").textContent = "This browser keeps no conversations here: they end with the page.";
  }
  at("forget").hidden = talks.length < 2;
  at("conversations").replaceChildren(...talks.map(row));
}

function row(talk) {
  const isOpen = talk.id === handlers.current();
  const open = make("button", {
    type: "button", class: "talk", "aria-current": isOpen ? "true" : undefined, title: talk.title, text: talk.title,
    click: async () => { toggle(false); handlers.onOpen(await store.load(talk.id)); },
  });
  const rename = iconButton("edit", "Rename " + talk.title, async () => {
    const title = await ask({ title: "Rename", value: talk.title, action: "Save" });
    if (!title) return;
    const whole = await store.load(talk.id);
    if (whole) await store.save({ ...whole, title });
    handlers.onRename(talk.id, title);
    await show();
    document.querySelector(`[data-talk="${talk.id}"] .icon`)?.focus();
  });
  const remove = iconButton("trash", "Delete " + talk.title, async () => {
    const yes = await ask({ title: "Delete this conversation?", text: talk.title, action: "Delete" });
    if (!yes) return;
    await store.remove([talk.id]);
    if (talk.id === handlers.current()) handlers.onNew();
    await show();
    at("new").focus();
  });
  return make("li", { "data-talk": talk.id }, open, rename, remove);
}
