// Markdown as nodes: headings, lists, quotes, tables, code. Never parses markup, so hostile text stays text.

import { copyButton, make } from "./dom.js";
import { inline } from "./inline.js";

const MAX_DEPTH = 6;
const MAX_DIVIDER = 1000;
const MAX_CHARS = 200_000;  // beyond that, plain text
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]{0,30})[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}([-*_])( *\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const DIVIDER = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

export function markdown(text) {
  if (text.length > MAX_CHARS) return [make("pre", { class: "plain", text })];
  return blocks(text.replaceAll("\r\n", "\n").replaceAll("\t", "    ").split("\n"), 0);
}

function blocks(lines, depth) {
  const nodes = [];
  let i = 0;
  while (i < lines.length) {
    const [node, next] = block(lines, i, depth);
    if (node) nodes.push(node);
    i = next;
  }
  return nodes;
}

/* The block that begins in line i, and the line behind it. */
function block(lines, i, depth) {
  const line = lines[i];
  if (!line.trim()) return [null, i + 1];
  const fence = FENCE.exec(line);
  if (fence) return fenced(lines, i, fence);
  const heading = HEADING.exec(line);
  if (heading) return [headingNode(heading), i + 1];
  if (RULE.test(line)) return [make("hr"), i + 1];
  if (depth < MAX_DEPTH) {
    if (line.trimStart().startsWith(">")) return quote(lines, i, depth);
    if (ITEM.test(line)) return list(lines, i, depth);
  }
  if (isTable(lines, i)) return table(lines, i);
  return paragraph(lines, i, depth);
}

function headingNode([, marks, text]) {
  return make("h" + Math.min(marks.length + 2, 6), {}, ...inline(text.trimEnd().replace(/\s#+$/, "")));
}

function fenced(lines, i, [, fence, language]) {
  let end = i + 1;
  while (end < lines.length && !(lines[end].trim().startsWith(fence) && /^[`~]+$/.test(lines[end].trim()))) end++;
  return [codeBlock(lines.slice(i + 1, end).join("\n"), language), end + 1];
}

function codeBlock(text, language) {
  const head = make("div", { class: "code-head" }, make("span", { text: language || "text" }),
    copyButton("Copy code", () => text));
  return make("div", { class: "code" }, head, make("pre", { tabindex: "0" }, make("code", { text })));
}

function quote(lines, i, depth) {
  const inner = [];
  for (; i < lines.length && lines[i].trimStart().startsWith(">"); i++) {
    inner.push(lines[i].trimStart().replace(/^> ?/, ""));
  }
  return [make("blockquote", {}, ...blocks(inner, depth + 1)), i];
}

function list(lines, i, depth) {
  const [, lead, first] = ITEM.exec(lines[i]);
  const isOrdered = /\d/.test(first);
  const node = isOrdered ? make("ol", { start: parseInt(first, 10) }) : make("ul");
  while (i < lines.length) {
    const found = ITEM.exec(lines[i]);
    if (!found || found[1].length > lead.length + 1 || /\d/.test(found[2]) !== isOrdered || RULE.test(lines[i])) break;
    if (found[1].length < lead.length) break;
    const inner = [found[3]], width = found[1].length + found[2].length + 1;
    i++;
    while (i < lines.length && belongs(lines, i, found[1].length)) inner.push(outdent(lines[i++], width));
    node.append(make("li", {}, ...tight(blocks(inner, depth + 1))));
    while (i + 1 < lines.length && !lines[i].trim() && ITEM.test(lines[i + 1])) i++;  // a loose list
  }
  return [node, i];
}

const indent = (line) => line.length - line.trimStart().length;

function belongs(lines, i, column) {
  if (lines[i].trim()) {
    const isLazy = !ITEM.test(lines[i]) && !isStart(lines[i]) && !!lines[i - 1].trim();
    return isLazy || indent(lines[i]) > column;
  }
  return i + 1 < lines.length && !!lines[i + 1].trim() && indent(lines[i + 1]) > column + 1;
}

const isStart = (line) => FENCE.test(line) || HEADING.test(line) || RULE.test(line) || line.trimStart().startsWith(">");

const outdent = (line, width) => line.slice(Math.min(indent(line), width));

/* An item of one paragraph needs none. */
function tight(nodes) {
  if (nodes[0]?.tagName !== "P") return nodes;
  return [...nodes[0].childNodes, ...nodes.slice(1)];
}

function isTable(lines, i) {
  const next = lines[i + 1] || "";
  return lines[i].includes("|") && next.length < MAX_DIVIDER && DIVIDER.test(next);
}

function cells(line) {
  const text = line.trim().replace(/^\|/, "").replace(/(^|[^\\])\|$/, "$1");
  return text.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function side(cell) {
  if (!cell.endsWith(":")) return undefined;
  return cell.startsWith(":") ? "center" : "right";
}

function table(lines, i) {
  const sides = cells(lines[i + 1]).map(side);
  const row = (line, tag) => make("tr", {}, ...cells(line).slice(0, sides.length).map((cell, column) =>
    make(tag, { class: sides[column], scope: tag === "th" ? "col" : undefined }, ...inline(cell))));
  const body = make("tbody"), head = make("thead", {}, row(lines[i], "th"));
  for (i += 2; i < lines.length && lines[i].includes("|"); i++) body.append(row(lines[i], "td"));
  return [make("div", { class: "wide-table", tabindex: "0" }, make("table", {}, head, body)), i];
}

function paragraph(lines, i, depth) {
  const first = i++;
  while (i < lines.length && lines[i].trim() && !isStart(lines[i]) && !(depth < MAX_DEPTH && ITEM.test(lines[i]))
    && !isTable(lines, i)) i++;
  return [make("p", {}, ...inline(lines.slice(first, i).join("\n").trim())), i];
}
