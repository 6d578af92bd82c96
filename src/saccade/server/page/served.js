// Under an answer: how long it took, and which graphs served it.

import { make } from "./dom.js";

const MIN_MS = 50;  // a rate over less time says nothing
const PHASES = ["vision", "prefill", "decode", "head", "sample"];

export function summary({ first, total, usage, timings, finish, stopped }) {
  const parts = [];
  if (stopped) parts.push("stopped");
  if (first) parts.push("first token " + milliseconds(first));
  const count = usage?.completion_tokens ?? 0;
  const rate = (1000 * (count - 1)) / (total - first);
  if (first && count > 2 && total > first + MIN_MS) parts.push(rate.toFixed(rate < 100 ? 1 : 0) + " tokens/s");
  if (usage) parts.push(usage.prompt_tokens + " tokens in, " + count + " out");
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  if (cached) parts.push(cached + " from the cache");
  if (timings?.vision_ms) parts.push("image " + milliseconds(timings.vision_ms));
  if (finish === "length") parts.push("cut off by the limit of tokens");
  return parts.join(" · ");
}

export function milliseconds(ms) {
  return ms < 1000 ? Math.round(ms) + " ms" : (ms / 1000).toFixed(ms < 10000 ? 2 : 1) + " s";
}

/* A fold: replays of this answer alone, by graph, with their padding; whatever ran without a graph, with the reason. */
export function served(passes) {
  if (!passes?.length) return null;
  const sorted = [...passes].sort((a, b) => PHASES.indexOf(a.phase) - PHASES.indexOf(b.phase));
  const replays = count(sorted.filter((one) => one.graph)), eager = count(sorted.filter((one) => !one.graph));
  const words = [replays + (replays === 1 ? " graph replay" : " graph replays")];
  if (eager) words.push(eager + " without a graph");
  const head = make("tr", {},
    ...["pass", "graph", "times", "rows", "padding"].map((text) => make("th", { scope: "col", text })));
  const body = make("tbody", {}, ...sorted.map(row));
  const table = make("div", { class: "wide-table", tabindex: "0" }, make("table", {}, make("thead", {}, head), body));
  return make("details", { class: "served" }, make("summary", { text: "Served by " + words.join(", ") }), table);
}

const count = (list) => list.reduce((sum, one) => sum + one.passes, 0);

function row(one) {
  const name = one.graph ? one.graph.replace(one.phase + "/", "") : "none: " + one.reason;
  const padding = one.rows + one.padded ? Math.round((100 * one.padded) / (one.rows + one.padded)) + " %" : "";
  const phase = make("td", {}, make("span", { class: "dot " + one.phase }), one.phase);
  const figures = [one.passes, one.rows, padding].map((text) => make("td", { class: "right", text }));
  return make("tr", { class: one.graph ? undefined : "eager" }, phase, make("td", { text: name }), ...figures);
}
