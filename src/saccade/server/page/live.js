// The live view: what the engine does now and did a moment ago.

import * as api from "./api.js";
import { chart, meter } from "./charts.js";
import { at, make } from "./dom.js";
import { graphTables } from "./graphs.js";
import { describe, lanes, mainPass } from "./lanes.js";
import { milliseconds } from "./served.js";
import { keyForm } from "./turns.js";

const POLL_MS = 1000, GRAPHS_MS = 5000, MAX_PASSES = 512, MAX_SAMPLES = 300;
const SPANS = [2, 10, 60];
const LEGEND = { vision: "vision", prefill: "prefill", decode: "decode", pad: "padding", eager: "without a graph" };
let passes = [], samples = [], since = 0, span = 10, timer = 0, graphsAt = 0, parts = null, unlock = null;

export function setUp(given) {
  unlock = given.unlock;
  const problem = make("div", { class: "live-problem" });
  const lane = lanes({ seconds: () => span });
  const choose = make("div", { class: "tabs", role: "group", "aria-label": "Seconds shown" }, ...SPANS.map((seconds) =>
    make("button", { type: "button", text: seconds + " s", "aria-pressed": String(seconds === span), click: (event) => {
      span = seconds;
      for (const other of choose.children) other.setAttribute("aria-pressed", String(other === event.target));
      draw(samples.at(-1));
    } })));
  const legend = make("p", { class: "legend" }, ...Object.entries(LEGEND)
    .flatMap(([style, text]) => [make("span", { class: "dot " + style }), make("span", { text })]));
  const newest = make("tbody"), last = make("details", {}, make("summary", { text: "Newest passes as a list" }),
    make("div", { class: "wide-table", tabindex: "0" },
      make("table", {}, make("caption", { class: "hidden", text: "Newest passes" }), newest)));
  parts = {
    problem, lane, newest, last, figures: make("div", { class: "figures" }), tables: graphTables(),
    tokens: chart("Tokens per second", { format: (n) => Math.round(n) + "/s" }),
    first: chart("Time to first token", { format: (n) => milliseconds(n) }),
    requests: chart("Requests", { kind: "line", format: (n) => String(n) }),
    kv: meter("KV cache"), encoder: meter("Image cache"),
    prefix: meter("Prompt tokens found in the cache"), images: meter("Images found in the cache"),
  };
  const grow = make("span", { class: "grow" });
  const head = make("div", { class: "row" }, make("h2", { text: "Passes" }), parts.figures, grow, choose);
  at("live").append(problem,
    make("section", { class: "card passes" }, head, lane.node, legend, last),
    make("div", { class: "cards" }, parts.tokens.node, parts.first.node, parts.requests.node),
    make("div", { class: "cards four" }, parts.kv.node, parts.encoder.node, parts.prefix.node, parts.images.node),
    parts.tables.node);
}

export function show(isShown) {
  clearTimeout(timer);
  timer = 0;
  if (isShown) poll();
}

async function poll() {
  const own = timer = setTimeout(() => {}, 0);
  try {
    if (!document.hidden) await refresh();
    parts.problem.replaceChildren();
  } catch (error) {
    const node = make("div", { class: "problem", role: "alert" }, make("p", { text: error.message }));
    if (error.status === 401) node.append(keyForm("Unlock", (key) => { unlock(key); show(true); }));
    if (!parts.problem.contains(document.activeElement)) parts.problem.replaceChildren(node);
  }
  if (timer === own) timer = setTimeout(poll, POLL_MS);
}

async function refresh() {
  const found = await api.get("live?since=" + since);
  if (isRestarted(found)) {
    passes = [];
    samples = [];
    since = 0;
    return;
  }
  if (found.passes.length) since = found.passes.at(-1).number;
  passes = [...passes, ...found.passes].slice(-MAX_PASSES);
  samples = [...samples, found].slice(-MAX_SAMPLES);
  draw(found);
  if (performance.now() - graphsAt > GRAPHS_MS || !graphsAt) {
    graphsAt = performance.now();
    parts.tables.draw(await api.get("graphs"));
  }
}

/* An engine that was restarted counts from the beginning. */
function isRestarted({ now, scheduler }) {
  const before = samples.at(-1);
  return before && (now < before.now || scheduler.prefix_queried_tokens < before.scheduler.prefix_queried_tokens);
}

function draw(found) {
  if (!found) return;
  const { now, scheduler, pending, seconds } = found;
  parts.lane.draw(passes, now);
  drawFigures();
  const age = (one) => now - one.second - 1;
  const lately = seconds.filter((one) => age(one) < 5 && age(one) > -1);
  const rate = lately.reduce((sum, one) => sum + one.output_tokens, 0) / 5;
  const outputs = seconds.map((one) => [age(one), one.output_tokens]);
  parts.tokens.draw([{ style: "decode", points: outputs }], rate ? rate.toFixed(rate < 10 ? 1 : 0) + " out" : "idle");
  const firsts = seconds.filter((one) => one.first_tokens)
    .map((one) => [age(one), (1000 * one.first_token_s) / one.first_tokens]);
  parts.first.draw([{ style: "prefill", points: firsts }], firsts.length ? milliseconds(firsts.at(-1)[1]) : "none yet");
  const counted = (value) => samples.map((one) => [now - one.now, value(one)]);
  const waiting = scheduler.waiting + pending;
  parts.requests.draw([
    { style: "queued", points: counted((one) => one.scheduler.running + one.scheduler.waiting + one.pending) },
    { style: "decode", points: counted((one) => one.scheduler.running) },
  ], scheduler.running + " running, " + waiting + " waiting");
  parts.kv.draw(scheduler.kv_usage, found.kv_cache_tokens.toLocaleString("en") + " tokens in all");
  parts.encoder.draw(scheduler.encoder_usage, "of its rows in use");
  parts.prefix.draw(share(scheduler.prefix_hit_tokens, scheduler.prefix_queried_tokens),
    scheduler.prefix_hit_tokens.toLocaleString("en") + " of " + scheduler.prefix_queried_tokens.toLocaleString("en"));
  parts.images.draw(share(scheduler.encoder_hits, scheduler.encoder_queries),
    scheduler.encoder_hits + " of " + scheduler.encoder_queries);
  if (parts.last.open) parts.newest.replaceChildren(...passes.slice(-20).reverse().map(row));
}

const share = (part, whole) => (whole ? part / whole : 0);

function row(record) {
  const [head, ...rest] = describe(record), pass = mainPass(record);
  return make("tr", {}, make("td", {}, make("span", { class: "dot " + (pass.graph ? pass.phase : "eager") }), head),
    make("td", { text: rest.join("; ") }));
}

function drawFigures() {
  const all = passes.flatMap((record) => record.passes), replayed = all.filter((one) => one.graph);
  const padded = replayed.reduce((sum, one) => sum + one.padded, 0);
  const rows = replayed.reduce((sum, one) => sum + one.rows, padded);
  const figures = [Math.floor(100 * share(replayed.length, all.length)) + " % replayed",
    Math.round(100 * share(padded, rows)) + " % padding in the last " + all.length + " passes"];
  parts.figures.replaceChildren(make("span", { class: "soft", text: all.length ? figures.join(", ") : "none yet" }));
}
