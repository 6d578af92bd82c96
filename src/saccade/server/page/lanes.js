// The passes of the engine over time, one lane for vision and one for language. A bar is a pass: as wide as it took,
// filled as far as its graph was, hatched where it was padding; without a graph in another color.

import { make, svg } from "./dom.js";
import { milliseconds } from "./served.js";

const WIDE = 1000, HIGH = 64, TOP = 22, GAP = 26;
const STREAMS = [["vision", "Vision passes"], ["language", "Language passes"]];
const MAIN = ["vision", "prefill", "decode"];

export function lanes({ seconds }) {
  const drawing = svg("svg", {
    class: "lanes", viewBox: `0 0 ${WIDE} ${TOP + 2 * (HIGH + GAP)}`, preserveAspectRatio: "none",
    role: "img", "aria-label": "Passes of the engine over time",
  });
  const tip = make("div", { class: "tip", hidden: true });
  const labels = make("div", { class: "lane-labels" });
  const node = make("div", { class: "lane-box" }, labels, drawing, tip);
  let shown = [];
  drawing.addEventListener("pointermove", (event) => hover(event, shown, tip, node));
  drawing.addEventListener("pointerleave", () => { tip.hidden = true; });
  return {
    node,
    draw(records, now) {
      const last = records.at(-1), span = seconds();
      const newest = last ? last.start + last.seconds : now;
      const end = now - newest > span ? newest + span / 20 : now;  // when idle, what ran last stays in sight
      const begin = end - span;
      shown = records.filter((record) => record.start + record.seconds > begin);
      const place = (time) => ((time - begin) / span) * WIDE;
      drawing.replaceChildren(pattern(), ...grid(), ...shown.flatMap((record) => bar(record, place)));
      labels.replaceChildren(...ticks(span, now - end), ...STREAMS.map(([, name], index) => {
        const label = make("span", { class: "lane-name", text: name });
        label.style.top = TOP + index * (HIGH + GAP) - 1 + "px";
        return label;
      }));
    },
  };
}

function pattern() {
  const lines = svg("path", { d: "M-1 1l2-2M0 6l6-6M5 7l2-2", class: "hatch-line" });
  const ground = svg("rect", { width: 6, height: 6, class: "hatch-ground" });
  const size = { width: 6, height: 6, patternUnits: "userSpaceOnUse" };
  return svg("defs", {}, svg("pattern", { id: "hatch", ...size }, ground, lines));
}

function grid() {
  return Array.from({ length: 11 }, (_, i) => (i * WIDE) / 10)
    .map((x) => svg("line", { class: "grid", x1: x, x2: x, y1: TOP, y2: TOP + 2 * (HIGH + GAP) }));
}

function ticks(span, idle) {
  return [0, 2, 4, 6, 8].map((i) => {
    const age = idle + (span * (10 - i)) / 10;
    const tick = make("span", { class: "tick", text: "−" + age.toFixed(span < 5 ? 1 : 0) + " s" });
    tick.style.left = i * 10 + "%";
    return tick;
  });
}

export const mainPass = (record) => record.passes.find((one) => MAIN.includes(one.phase)) || record.passes[0];

function bar(record, place) {
  const lane = STREAMS.findIndex(([stream]) => stream === record.stream), pass = mainPass(record);
  const x = place(record.start), width = Math.max(place(record.start + record.seconds) - x, 1.5);
  const top = TOP + GAP + lane * (HIGH + GAP), rows = pass.rows + pass.padded;
  const full = rows ? (HIGH * pass.rows) / rows : HIGH;
  const style = pass.graph ? pass.phase : "eager";
  const common = { "data-number": record.number, x, width };
  const used = svg("rect", { ...common, class: "bar " + style, y: top + HIGH - full, height: full });
  if (!pass.padded) return [used];
  return [used, svg("rect", { ...common, class: "bar pad", y: top, height: HIGH - full, fill: "url(#hatch)" })];
}

function hover(event, shown, tip, node) {
  const number = Number(event.target.dataset?.number);
  const record = shown.find((one) => one.number === number);
  tip.hidden = !record;
  if (!record) return;
  tip.replaceChildren(...describe(record).map((text, index) => make(index ? "div" : "strong", { text })));
  const box = node.getBoundingClientRect();
  tip.style.left = Math.min(Math.max(event.clientX - box.left - 110, 0), Math.max(box.width - 260, 0)) + "px";
  tip.style.top = event.clientY - box.top + 18 + "px";
}

export function describe(record) {
  const requests = record.requests + (record.requests === 1 ? " request" : " requests");
  const lines = [[mainPass(record).phase, milliseconds(record.seconds * 1000), requests].join(", ")];
  for (const pass of record.passes) {
    const fill = pass.rows + " of " + (pass.rows + pass.padded) + " rows";
    lines.push(pass.graph ? pass.graph + ": " + fill : pass.phase + " without a graph: " + pass.reason + "; " + fill);
  }
  return lines;
}
