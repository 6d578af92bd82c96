// Every phase and its graphs since the start: replays, memory, padding, and why something was not replayed.

import { make } from "./dom.js";

const MIB = 1024 * 1024, MAX_ROWS = 60;

export function graphTables() {
  const phases = make("tbody"), graphs = make("tbody");
  const head = (names) => make("thead", {},
    make("tr", {}, ...names.map((text, i) => make("th", { scope: "col", class: i ? "right" : undefined, text }))));
  const all = make("details", {}, make("summary", { text: "Graphs that were replayed" }),
    make("div", { class: "wide-table", tabindex: "0" },
      make("table", {}, head(["graph", "tier", "MiB", "replays"]), graphs)));
  const table = make("div", { class: "wide-table", tabindex: "0" },
    make("table", {}, head(["phase", "graphs", "MiB", "replays", "padding", "without a graph"]), phases));
  return {
    node: make("section", { class: "card" }, make("h2", { text: "Graphs since the start" }), table, all),
    draw(data) {
      phases.replaceChildren(...data.phases.map(phaseRow));
      const used = data.phases.flatMap((phase) => phase.graphs).filter((graph) => graph.replays);
      used.sort((a, b) => b.replays - a.replays);
      graphs.replaceChildren(...used.slice(0, MAX_ROWS).map((graph) => {
        const state = graph.out_of_service ? " (out of service: " + graph.out_of_service + ")" : "";
        return row(graph.key + state, graph.tier, mib(graph.bytes), graph.replays);
      }));
    },
  };
}

function phaseRow(phase) {
  const rows = phase.real_rows + phase.padded_rows;
  const padding = rows ? ((100 * phase.padded_rows) / rows).toFixed(1) + " %" : "";
  const why = Object.entries(phase.fallbacks).map(([reason, count]) => count + " " + reason.replaceAll("_", " "));
  const line = row(phase.phase, phase.graphs.length, mib(phase.graphs.reduce((sum, graph) => sum + graph.bytes, 0)),
    Object.values(phase.replays).reduce((sum, count) => sum + count, 0), padding, why.join(", ") || "0");
  line.firstChild.prepend(make("span", { class: "dot " + phase.phase }));
  return line;
}

const mib = (bytes) => (bytes / MIB).toFixed(1);
const row = (...cells) => make("tr", {},
  ...cells.map((cell, i) => make("td", { class: i ? "right" : undefined, text: String(cell) })));
