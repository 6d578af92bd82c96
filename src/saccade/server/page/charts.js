// Small charts of the last minutes, drawn as SVG.

import { make, svg } from "./dom.js";

const WIDE = 300, HIGH = 72, SPAN_S = 180;

/* `points` are [age in seconds, value], oldest first: a line for what lasts, bars for what happens in a second. */
export function chart(title, { kind = "bars", format = String, more = "" } = {}) {
  const drawing = svg("svg",
    { viewBox: `0 0 ${WIDE} ${HIGH}`, preserveAspectRatio: "none", role: "img", class: "chart " + more });
  const value = make("strong", { text: "–" }), most = make("span", { class: "soft" });
  const node = make("section", { class: "card" }, make("h3", { text: title }), value, drawing,
    make("div", { class: "axis soft" }, make("span", { text: "3 min ago" }), most, make("span", { text: "now" })));
  return {
    node,
    draw(series, now) {
      const all = series.flatMap(({ points }) => points.filter(([age]) => age <= SPAN_S));
      const top = Math.max(...all.map(([, y]) => y), 0);
      value.textContent = now;
      most.textContent = top ? "highest " + format(top) : "";
      drawing.setAttribute("aria-label", title + ": " + now + (top ? ", highest " + format(top) : ""));
      drawing.replaceChildren(svg("line", { class: "base", x1: 0, x2: WIDE, y1: HIGH - 0.5, y2: HIGH - 0.5 }),
        ...series.flatMap((one) => (kind === "bars" ? bars(one, top) : line(one, top))));
    },
  };
}

const across = (age) => WIDE - (age / SPAN_S) * WIDE;
const up = (value, top) => HIGH - (value / (top || 1)) * (HIGH - 6);

function bars({ points, style }, top) {
  const width = Math.max(WIDE / SPAN_S - 0.2, 1);
  return points.filter(([age, y]) => age <= SPAN_S && y > 0)
    .map(([age, y]) => svg("rect",
      { class: style, x: across(age) - width, y: up(y, top), width, height: HIGH - up(y, top) }));
}

function line({ points, style }, top) {
  const seen = points.filter(([age]) => age <= SPAN_S);
  if (seen.length < 2) return [];
  const places = seen.map(([age, y]) => [across(age).toFixed(1), up(y, top).toFixed(1)]);
  const path = places.map(([x, y], i) => (i ? `H${x}V${y}` : `M${x} ${y}`)).join("");
  const area = `${path}V${HIGH}H${across(seen[0][0]).toFixed(1)}Z`;
  return [svg("path", { class: "area " + style, d: area }), svg("path", { class: "stroke " + style, d: path })];
}

export function meter(title) {
  const value = make("strong", { text: "–" }), detail = make("span", { class: "soft" });
  const bar = make("div", { class: "fill" });
  const gauge = make("div",
    { class: "gauge", role: "meter", "aria-label": title, "aria-valuemin": 0, "aria-valuemax": 100 }, bar);
  return {
    node: make("section", { class: "card meter" }, make("h3", { text: title }), value, gauge, detail),
    draw(share, text) {
      const percent = Math.round(100 * share);
      value.textContent = percent + " %";
      bar.style.width = percent + "%";
      gauge.setAttribute("aria-valuenow", percent);
      detail.textContent = text;
    },
  };
}
