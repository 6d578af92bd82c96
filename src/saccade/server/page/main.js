// Puts the page together: the model, the state of the server, the views.

import * as api from "./api.js";
import * as chat from "./chat.js";
import { focus } from "./composer.js";
import { at, make } from "./dom.js";
import * as history from "./history.js";
import * as live from "./live.js";

const RETRY_MS = 2000;
let cards = [];
const card = () => cards.find((one) => one.id === at("model").value) || cards[0];

async function connect() {
  try {
    await api.get("ready");
    cards = (await api.get("v1/models")).data;
    const option = ({ id }) => make("option", { value: id, title: id, text: id.split("/").pop() || id });
    at("model").replaceChildren(...cards.map(option));
    at("model").disabled = cards.length < 2;
    state("ready", "");
    if (chat.isEmpty()) chat.draw();
  } catch (error) {
    if (error.status === 401) {
      state("locked", "key needed");
      chat.draw(error.message);
      return;
    }
    state(error.status === 503 ? "starting" : "gone", error.status === 503 ? "loading the model" : "not reachable");
    setTimeout(connect, RETRY_MS);
  }
}

function state(name, text) {
  at("state").dataset.state = name;
  at("state").textContent = text;
}

function unlock(key) {
  api.setKey(key);
  connect();
}

function view(name) {
  document.body.dataset.view = name;
  at("chat").hidden = name !== "chat";
  at("live").hidden = name !== "live";
  for (const tab of ["chat", "live"]) at("tab-" + tab).setAttribute("aria-pressed", String(tab === name));
  window.history.replaceState(null, "", "#" + name);
  live.show(name === "live");
  if (name === "chat") focus();
}

chat.setUp({ card, unlock });
live.setUp({ unlock });
at("tab-chat").onclick = () => view("chat");
at("tab-live").onclick = () => view("live");
at("model").onchange = () => { if (chat.isEmpty()) chat.draw(); };
history.show();
chat.draw();
connect();
const named = () => (location.hash === "#live" ? "live" : "chat");
view(named());
addEventListener("hashchange", () => view(named()));
addEventListener("load", () => { if (!at("chat").hidden) focus(); });  // styles are there only now
