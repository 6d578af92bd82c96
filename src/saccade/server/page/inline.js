// Text inside a Markdown block: code, emphasis, links. Builds nodes; whatever is not understood stays text.

import { make } from "./dom.js";

const MARKS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];
const SCHEMES = new Set(["http:", "https:", "mailto:"]);
const SPECIAL = /[\\`*_~[!\n]|https?:\/\//g;
const MAX_DEPTH = 8;
const MAX_LINK = 2000;

export function inline(text, depth = 0) {
  const nodes = [];
  const missing = new Set();  // marks without a partner further on: searched for once, so that time stays linear
  let plain = "", i = 0;
  const flush = () => { if (plain) nodes.push(document.createTextNode(plain)); plain = ""; };
  while (i < text.length) {
    SPECIAL.lastIndex = i;
    const next = SPECIAL.exec(text)?.index ?? text.length;
    plain += text.slice(i, next);
    i = next;
    if (i >= text.length) break;
    const found = depth < MAX_DEPTH ? special(text, i, depth, missing) : null;
    if (found) {
      flush();
      nodes.push(...found.nodes);
      i = found.end;
    } else if (text[i] === "\\" && /[!-/:-@[-`{-~]/.test(text[i + 1] || "")) {
      plain += text[i + 1];
      i += 2;
    } else {
      plain += text[i];
      i += 1;
    }
  }
  flush();
  return nodes;
}

function special(text, i, depth, missing) {
  if (text[i] === "\n") return { nodes: [make("br")], end: i + 1 };
  if (text[i] === "`") return code(text, i, missing);
  if (text[i] === "h") return bare(text, i);
  if (text[i] === "[" || (text[i] === "!" && text[i + 1] === "[")) return link(text, i, depth);
  return emphasis(text, i, depth, missing);
}

function seek(text, mark, from, missing) {
  if (missing.has(mark)) return -1;
  const end = text.indexOf(mark, from);
  if (end < 0) missing.add(mark);
  return end;
}

function code(text, i, missing) {
  let ticks = 1;
  while (text[i + ticks] === "`" && ticks < 4) ticks++;
  const end = seek(text, "`".repeat(ticks), i + ticks, missing);
  if (end < 0) return null;
  return { nodes: [make("code", { text: text.slice(i + ticks, end).replace(/^ (.+) $/, "$1") })], end: end + ticks };
}

function emphasis(text, i, depth, missing) {
  for (const [mark, tag] of MARKS) {
    if (!text.startsWith(mark, i)) continue;
    const inWord = mark[0] === "_" && /\w/.test(text[i - 1] || "");
    if (inWord || /\s|^$/.test(text[i + mark.length] || "")) return null;
    const end = seek(text, mark, i + mark.length + 1, missing);
    if (end < 0 || /\s/.test(text[end - 1]) || (mark[0] === "_" && /\w/.test(text[end + mark.length] || ""))) {
      if (mark.length === 2) continue;
      return null;
    }
    return { nodes: [make(tag, {}, ...inline(text.slice(i + mark.length, end), depth + 1))], end: end + mark.length };
  }
  return null;
}

/* [text](address). Pictures of elsewhere are not loaded: they become links. */
function link(text, i, depth) {
  const begin = text.indexOf("[", i) + 1;
  const middle = begin + text.slice(begin, begin + MAX_LINK).indexOf("](");
  if (middle < begin) return null;
  const end = middle + 2 + text.slice(middle + 2, middle + MAX_LINK).indexOf(")");
  if (end < middle + 2) return null;
  const [address] = text.slice(middle + 2, end).trim().split(/\s+/, 1);
  const words = inline(text.slice(begin, middle), depth + 1);
  return { nodes: [anchor(address, words)], end: end + 1 };
}

function bare(text, i) {
  const [address] = /^https?:\/\/[^\s<>"'`]*[^\s<>"'`.,;:!?)\]}]/.exec(text.slice(i, i + 2000)) || [""];
  if (address.length < 10) return null;
  return { nodes: [anchor(address, [document.createTextNode(address)])], end: i + address.length };
}

function anchor(address, words) {
  let url = null;
  try { url = new URL(address); } catch { /* relative, or nonsense */ }
  if (!url || !SCHEMES.has(url.protocol)) return make("span", {}, ...words);
  const safe = { target: "_blank", rel: "noopener noreferrer nofollow" };
  return make("a", { href: url.href, title: url.href, ...safe }, ...words);
}
