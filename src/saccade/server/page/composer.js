// Where a question is written: text, images by button, paste or drop, and what the answer may be like.

import { at, icon } from "./dom.js";
import { MAX_MEDIA, readMedia, thumb } from "./media.js";

const SETTINGS = "saccade.settings";
const FIELDS = { system: "system", temperature: "temperature", topP: "top-p", maxTokens: "max-tokens", seed: "seed" };
let chosen = [];

export function setUp({ onAsk, onStop, isBusy }) {
  at("attach").append(icon("attach"));
  at("tune").append(icon("tune"));
  at("send").append(icon("send"));
  at("stop").append(icon("stop"));
  at("form").onsubmit = (event) => {
    event.preventDefault();
    submit(onAsk, isBusy);
  };
  at("question").onkeydown = (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    submit(onAsk, isBusy);
  };
  at("question").oninput = grow;
  at("stop").onclick = onStop;
  at("attach").onclick = () => at("files").click();
  at("files").onchange = async () => {
    await add([...at("files").files]);
    at("files").value = "";
    focus();
  };
  at("tune").onclick = () => {
    const isOpen = at("settings").hidden;
    showSettings(isOpen);
    if (isOpen) at("system").focus();
  };
  for (const id of Object.values(FIELDS)) at(id).onchange = keepSettings;
  restoreSettings();
  setUpDrop();
}

function submit(onAsk, isBusy) {
  const text = at("question").value.trim();
  if (isBusy() || (!text && !chosen.length)) return;
  if (!areSettingsRight()) return;
  const media = chosen;
  set("", []);
  onAsk(text, media);
}

/* Puts a question into the composer. */
export function set(text, media) {
  at("question").value = text;
  chosen = media;
  note("");
  show();
  grow();
}

/* Not on a phone, whose keyboard would cover half of the page. */
export function focus() {
  if (!matchMedia("(pointer: coarse)").matches) at("question").focus();
}

export function busy(is) {
  at("send").hidden = is;
  at("stop").hidden = !is;
}

export function note(text) {
  at("composer-note").textContent = text;
}

export async function add(files) {
  note("");
  const problems = [];
  for (const file of files) {
    if (chosen.length >= MAX_MEDIA) {
      problems.push("At most " + MAX_MEDIA + " images and videos fit into one question.");
      break;
    }
    try {
      const media = await readMedia(file);
      chosen = [...chosen, media];
    } catch (error) {
      problems.push(error.message);
    }
  }
  note(problems.join(" "));
  show();
}

function show() {
  at("chosen").replaceChildren(...chosen.map((media) => thumb(media, () => {
    chosen = chosen.filter((other) => other !== media);
    show();
    focus();
  })));
}

function grow() {
  const area = at("question");
  area.style.height = "auto";
  area.style.height = Math.min(area.scrollHeight, window.innerHeight * 0.4) + "px";
}

/* ---- sampling ---- */
export function sampling() {
  const number = (id) => (at(id).value === "" ? undefined : Number(at(id).value));
  return {
    system: at("system").value.trim(),
    temperature: number("temperature"), top_p: number("top-p"),
    max_completion_tokens: number("max-tokens"), seed: number("seed"),
  };
}

function showSettings(isOpen) {
  at("settings").hidden = !isOpen;
  at("tune").setAttribute("aria-expanded", String(isOpen));
}

/* Says which field is wrong, where it can be seen. */
function areSettingsRight() {
  const isWrong = ({ validity }) => validity.badInput || validity.rangeUnderflow || validity.rangeOverflow;
  const field = Object.values(FIELDS).map(at).find(isWrong);
  if (!field) return true;
  const name = field.labels[0].firstChild.textContent.trim();
  note(`${name} must be a number ${field.max ? `from ${field.min} to ${field.max}` : `of at least ${field.min}`}.`);
  showSettings(true);
  field.focus();
  return false;
}

function keepSettings() {
  const values = Object.fromEntries(Object.entries(FIELDS).map(([name, id]) => [name, at(id).value]));
  try { localStorage.setItem(SETTINGS, JSON.stringify(values)); } catch { /* they last as long as the page */ }
  at("tune").classList.toggle("set", Object.values(values).some(Boolean));
}

function restoreSettings() {
  try {
    const values = JSON.parse(localStorage.getItem(SETTINGS) || "{}");
    for (const [name, id] of Object.entries(FIELDS)) at(id).value = String(values[name] ?? "");
  } catch { /* nothing was kept */ }
  at("tune").classList.toggle("set", Object.values(FIELDS).some((id) => at(id).value));
}

/* ---- paste and drop ---- */
function setUpDrop() {
  document.addEventListener("paste", (event) => {
    const files = [...(event.clipboardData?.files || [])];
    if (!files.length) return;
    event.preventDefault();
    add(files);
  });
  const hint = (is) => document.body.classList.toggle("dropping", is);
  for (const name of ["dragenter", "dragover"]) {
    document.addEventListener(name, (event) => {
      if (![...(event.dataTransfer?.types || [])].includes("Files")) return;
      event.preventDefault();
      hint(true);
    });
  }
  document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) hint(false); });
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    hint(false);
    add([...(event.dataTransfer?.files || [])]);
  });
}
