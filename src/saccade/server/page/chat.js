// A conversation: what was said, what is sent, and the answer under way.

import * as api from "./api.js";
import * as composer from "./composer.js";
import { announce, at, make } from "./dom.js";
import * as history from "./history.js";
import { mediaPart } from "./media.js";
import { LIMITS } from "./store.js";
import { answerTurn, keyForm, userTurn } from "./turns.js";
import { welcome } from "./welcome.js";

const MAX_TITLE = 60;
let talk = fresh(), running = null, server = null;

function fresh() {
  return { id: crypto.getRandomValues(new Uint32Array(3)).join("-"), title: "", updated: 0, turns: [] };
}

export function setUp(given) {
  server = given;  // card(): the model; unlock(key): takes a key
  composer.setUp({ onAsk: ask, onStop: stop, isBusy: () => running !== null });
  history.setUp({
    onNew: () => openTalk(fresh()), onOpen: (found) => openTalk(found || fresh()), current: () => talk.id,
    onRename: (id, title) => { if (id === talk.id) talk.title = title; },
  });
  stickToEnd();
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !document.querySelector("dialog[open]")) running ? stop() : history.toggle(false);
  });
}

/* While the end is in sight, it stays there, also when the composer grows. */
function stickToEnd() {
  let sticks = true;
  at("log").addEventListener("scroll", () => { sticks = isAtEnd(); });
  new ResizeObserver(() => { if (sticks && !isEmpty()) toEnd(); }).observe(at("log"));
}

export const isEmpty = () => talk.turns.length === 0;

function openTalk(next) {
  stop();
  talk = next;
  for (const turn of talk.turns) turn.isDone = true;
  draw();
  composer.set("", []);
  history.show();
  composer.focus();
}

/* Draws the whole conversation, or the empty state. `locked`: a sentence of a server that wants a key. */
export function draw(locked) {
  const log = at("log");
  if (isEmpty()) {
    const start = locked
      ? make("section", { class: "welcome" }, make("h2", { text: "This server asks for a key" }),
        make("p", { class: "soft", text: locked }), keyForm("Unlock", server.unlock))
      : welcome(server.card(), ask);
    log.replaceChildren(start);
    return;
  }
  log.replaceChildren(...talk.turns.map((turn, index) => drawTurn(turn, index).node));
  toEnd();
}

function drawTurn(turn, index) {
  if (turn.role === "user") return { node: userTurn(turn, { onEdit: (text) => askAt(index, text, turn.media) }) };
  const question = talk.turns[index - 1];
  return answerTurn(turn, {
    onAgain: () => askAt(index - 1, question.text, question.media),
    onEdit: () => at("log").children[index - 1].querySelector("[aria-label='Edit question']").click(),
    onKey: (key) => { server.unlock(key); askAt(index - 1, question.text, question.media); },
    images: () => talk.turns.slice(0, index).reverse().find((earlier) => earlier.media?.length)?.media || [],
    vision: () => server.card()?.vision,
  });
}

function stop() {
  running?.abort();
  running = null;
  composer.busy(false);
}

/* Asks anew in the place of a question; what followed it is dropped. */
function askAt(index, text, media) {
  stop();
  talk.turns = talk.turns.slice(0, index);
  draw();
  ask(text, media);
}

async function ask(text, media) {
  if (running) return;
  const mine = talk, control = new AbortController();
  if (isEmpty()) at("log").replaceChildren();
  const turn = { role: "assistant", text: "", reasoning: "", isDone: false };
  for (const item of media || []) item.isTooLarge = item.bytes > LIMITS.itemBytes;
  mine.turns.push({ role: "user", text, media: media || [] }, turn);
  mine.title = mine.title || (text || media?.[0]?.name || "Image").slice(0, MAX_TITLE);
  const last = mine.turns.length - 1, view = drawTurn(turn, last);
  at("log").append(drawTurn(mine.turns[last - 1], last - 1).node, view.node);
  toEnd();
  running = control;
  composer.busy(true);
  announce("Waiting for the answer");
  history.save({ ...mine, updated: Date.now(), turns: mine.turns.slice(0, -1) });  // there, should the page be left now
  await answer(mine, turn, view, control);
  if (running === control) {
    running = null;
    composer.busy(false);
  }
  turn.isDone = true;
  if (!mine.turns.includes(turn)) return;  // asked anew meanwhile
  if (mine === talk) {
    const wasAtEnd = isAtEnd();
    view.end();
    if (wasAtEnd) toEnd();
    announce(turn.error ? turn.error.message
      : "Answer: " + view.node.querySelector(".markdown").textContent.slice(0, 500));
  }
  mine.updated = Date.now();
  await history.save(mine);
}

async function answer(mine, turn, view, control) {
  const began = performance.now();
  const stats = { first: 0, total: 0, usage: null, timings: null, finish: "", stopped: false };
  const draw = throttled(() => {
    if (mine !== talk || turn.isDone) return;
    const wasAtEnd = isAtEnd();
    view.show();
    if (wasAtEnd) toEnd();
  });
  try {
    for await (const chunk of api.chat(request(mine), control.signal)) {
      const choice = chunk.choices?.[0], delta = choice?.delta || {};
      if (delta.content || delta.reasoning_content) stats.first = stats.first || performance.now() - began;
      turn.text += delta.content || "";
      turn.reasoning += delta.reasoning_content || "";
      stats.finish = choice?.finish_reason || stats.finish;
      stats.usage = chunk.usage || stats.usage;
      stats.timings = chunk.timings || stats.timings;
      turn.passes = chunk.passes || turn.passes;
      draw();
    }
  } catch (error) {
    if (error.name === "AbortError") stats.stopped = true;
    else turn.error = { message: error.message, status: error.status || 0 };
  }
  stats.total = performance.now() - began;
  turn.stats = stats;
}

/* At most once a frame, and never more than half of the time: a long answer takes longer to draw. */
function throttled(work) {
  let isWaiting = false, took = 0;
  return () => {
    if (isWaiting) return;
    isWaiting = true;
    setTimeout(() => requestAnimationFrame(() => {
      const began = performance.now();
      work();
      took = performance.now() - began;
      isWaiting = false;
    }), Math.max(16, 2 * took));
  };
}

/* Questions without an answer are not sent again with the next one: what broke them would break it, too. */
function request(mine) {
  const { system, ...sampling } = composer.sampling();
  const messages = system ? [{ role: "system", content: system }] : [];
  mine.turns.forEach((turn, index) => {
    const isAsked = index === mine.turns.length - 2 || mine.turns[index + 1]?.text;
    if (turn.role === "user" && isAsked) messages.push({ role: "user", content: content(turn) });
    if (turn.role === "assistant" && turn.text) messages.push({ role: "assistant", content: turn.text });
  });
  return { model: at("model").value || undefined, messages, ...sampling };
}

function content(turn) {
  const media = (turn.media || []).filter((item) => item.url).map(mediaPart);
  if (!media.length) return turn.text || "(an image that is no longer there)";
  return turn.text ? [...media, { type: "text", text: turn.text }] : media;
}

const isAtEnd = () => at("log").scrollHeight - at("log").scrollTop - at("log").clientHeight < 80;
function toEnd() { at("log").scrollTop = at("log").scrollHeight; }
