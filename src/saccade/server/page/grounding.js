// Boxes and points that an answer names, drawn on the image they are about.

import { make, svg } from "./dom.js";
import { enlarge } from "./media.js";

const MAX_SHAPES = 100;
const NUMBER = "(-?\\d+(?:\\.\\d+)?)", GAP = "\\s*,\\s*";
const PAIR = `\\(\\s*${NUMBER}${GAP}${NUMBER}\\s*\\)`;
// <ref>cat</ref><box>(1,2),(3,4)</box>, also with the markers <|object_ref_start|> and <|box_start|>
const TAGGED = new RegExp(`(?:<(?:ref|\\|object_ref_start\\|)>([^<]{0,200})<(?:/ref|\\|object_ref_end\\|)>\\s*)?`
  + `<(?:box|\\|box_start\\|)>\\s*${PAIR}\\s*,?\\s*${PAIR}\\s*<(?:/box|\\|box_end\\|)>`, "g");

/* Shapes as { label, x1, y1, x2, y2 } or { label, x, y }, in shares (0 to 1) of the image. */
export function findShapes(text, image, vision) {
  const isInside = (value) => typeof value === "string" || (value >= 0 && value <= 1);
  const found = [...tagged(text), ...parsed(text, image, vision)];
  return found.filter((shape) => Object.values(shape).every(isInside)).slice(0, MAX_SHAPES);
}

function* tagged(text) {
  for (const [, label, ...numbers] of text.matchAll(TAGGED)) {
    const [x1, y1, x2, y2] = numbers.map((number) => Number(number) / 1000);
    yield box(label, x1, y1, x2, y2);
  }
}

function box(label, x1, y1, x2, y2) {
  const [left, right] = x1 < x2 ? [x1, x2] : [x2, x1], [top, bottom] = y1 < y2 ? [y1, y2] : [y2, y1];
  return { label: (label || "").trim(), x1: left, y1: top, x2: right, y2: bottom };
}

function* parsed(text, image, vision) {
  for (const item of items(text)) {
    const named = [item.label, item.name, item.text, item.text_content];
    const label = named.find((value) => typeof value === "string") || "";
    const [wide, high] = scale(image, vision, item);
    const area = item.bbox_2d || item.bbox;
    const point = item.point_2d || item.point;
    if (isNumbers(area, 4)) yield box(label, area[0] / wide, area[1] / high, area[2] / wide, area[3] / high);
    // Gemma's order: y first, always in thousandths.
    else if (isNumbers(item.box_2d, 4)) yield box(label, ...[1, 0, 3, 2].map((i) => item.box_2d[i] / 1000));
    else if (isNumbers(point, 2)) yield { label, x: point[0] / wide, y: point[1] / high };
  }
}

const isNumbers = (list, count) => Array.isArray(list) && list.length === count && list.every(Number.isFinite);

/* Objects of the JSON in an answer, in a fence or bare. Fences of other languages are read over, with their ends. */
function items(text) {
  const fenced = [...text.matchAll(/```(\w*)[^\n`]*\n([\s\S]*?)```/g)]
    .filter(([, language]) => /^(json)?$/i.test(language)).map(([, , inner]) => inner);
  const first = text.search(/[[{]/), last = Math.max(text.lastIndexOf("]"), text.lastIndexOf("}"));
  const found = [];
  for (const part of fenced.length ? fenced : [text.slice(first, last + 1)]) {
    if (!/_2d"|"bbox"|"point"/.test(part)) continue;
    try {
      const value = JSON.parse(part);
      found.push(...(Array.isArray(value) ? value : Array.isArray(value?.objects) ? value.objects : [value]));
    } catch { /* not JSON after all */ }
  }
  return found.filter((item) => item && typeof item === "object").slice(0, MAX_SHAPES);
}

/* What coordinates are counted in: some families, as the server says, count pixels of the image as it was resized for
   the encoder; others count thousandths of each side. */
function scale(image, vision, item) {
  const numbers = Object.values(item).flat().filter(Number.isFinite);
  const isPixels = vision?.has_pixel_places || Math.max(...numbers, 0) > 1000;
  return isPixels && image.width ? resized(image, vision) : [1000, 1000];
}

/* The server's rule: sides are multiples of the unit, the area is within the limits. */
function resized({ width, height }, vision) {
  if (!vision) return [width, height];
  if (vision.fixed_size) return [...vision.fixed_size].reverse();
  const { unit, min_pixels: least, max_pixels: most } = vision;
  let wide = Math.max(unit, Math.round(width / unit) * unit), high = Math.max(unit, Math.round(height / unit) * unit);
  if (wide * high > most) {
    const shrink = Math.sqrt((width * height) / most);
    wide = Math.max(unit, Math.floor(width / shrink / unit) * unit);
    high = Math.max(unit, Math.floor(height / shrink / unit) * unit);
  } else if (wide * high < least) {
    const stretch = Math.sqrt(least / (width * height));
    wide = Math.ceil((width * stretch) / unit) * unit;
    high = Math.ceil((height * stretch) / unit) * unit;
  }
  return [wide, high];
}

/* The image with its shapes, as a button that enlarges both. */
export function figure(media, shapes) {
  const named = shapes.map((shape) => shape.label).filter(Boolean).join(", ");
  const count = shapes.length + (shapes.length === 1 ? " place" : " places");
  const label = count + " on " + media.name + (named ? ": " + named : "");
  const image = () => make("img", { src: media.url, alt: media.name });
  const draw = () => make("span", { class: "grounded" }, image(), overlay(media, shapes));
  return make("button", { type: "button", class: "picture", "aria-label": "Enlarge: " + label,
    click: () => enlarge(draw(), label) }, draw());
}

function overlay(media, shapes) {
  const wide = media.width || 1000, high = media.height || 1000, unit = Math.max(wide, high) / 100;
  const drawn = shapes.flatMap((shape, index) => {
    const color = "c" + (index % 6), isBox = "x1" in shape;
    const x = (isBox ? shape.x1 : shape.x) * wide, y = (isBox ? shape.y1 : shape.y) * high;
    const sides = { width: (shape.x2 - shape.x1) * wide, height: (shape.y2 - shape.y1) * high };
    const mark = isBox ? svg("rect", { class: "shape " + color, x, y, ...sides, rx: unit / 2 })
      : svg("circle", { class: "shape point " + color, cx: x, cy: y, r: unit * 1.6 });
    if (!shape.label) return [mark];
    const size = unit * 3.4, top = y < size * 1.4 ? y + size * 1.1 : y - unit;
    const place = { x: x + (isBox ? unit / 2 : unit * 2.4), y: top, "font-size": size };
    return [mark, svg("text", { class: color, ...place, text: shape.label })];
  });
  return svg("svg", { viewBox: `0 0 ${wide} ${high}`, "aria-hidden": "true" }, ...drawn);
}
