// The empty state: pictures and questions to begin with.

import { make } from "./dom.js";
import { readMedia } from "./media.js";

// What the model that comes with Saccade knows: digits, shapes, colors, counts, printed words; two at once.
const BUNDLED = [
  ["digit.png", "What digit is this?", "a handwritten digit"],
  ["shapes.png", "How many circles are there, and what color are they?", "a star and two circles"],
  ["heart.png", "Describe this image.", "a heart"],
  ["word.png", "What does it say?", "a printed word"],
];
const OTHERS = [
  ["shapes.png", "Describe this picture in one sentence.", "a star and two circles"],
  ["shapes.png", "Where is the star? Answer with its bbox_2d and label as JSON.", "a star and two circles"],
  ["word.png", "Which word is written here, and in which color?", "a printed word"],
  ["heart.png", "Write a short poem about this.", "a heart"],
];
const TEXT = ["Explain what a CUDA graph is, with an example.", "Compare TCP and UDP in a table.",
  "Write a haiku about seeing."];

export function welcome(card, onAsk) {
  if (!card) {
    const dot = make("span", { class: "waiting", role: "img", "aria-label": "Waiting for the server" });
    return make("section", { class: "welcome" }, dot);
  }
  const seesImages = card.capabilities.includes("multimodal");
  const samples = card.is_bundled ? BUNDLED : OTHERS;
  const lead = card.is_bundled
    ? "This small model comes with Saccade. It knows shapes, colors, counts, digits and printed words."
    : seesImages ? "Drop an image here, paste one, or begin with one of these." : "This model reads text.";
  const cards = seesImages ? samples.map((sample) => pictureCard(sample, onAsk))
    : TEXT.map((text) => textCard(text, onAsk));
  return make("section", { class: "welcome", "aria-label": "Examples" },
    make("h2", { text: seesImages ? "Ask about an image" : "Ask something" }), make("p", { class: "soft", text: lead }),
    make("div", { class: "samples" }, ...cards));
}

function pictureCard([file, question, alt], onAsk) {
  const url = "page/" + file;
  const click = async () => {
    const blob = await (await fetch(url)).blob();
    onAsk(question, [await readMedia(new File([blob], file, { type: "image/png" }))]);
  };
  return make("button", { type: "button", class: "sample", click },
    make("span", { class: "frame" }, make("img", { src: url, alt })), make("span", { text: question }));
}

function textCard(text, onAsk) {
  return make("button", { type: "button", class: "sample words", text, click: () => onAsk(text, []) });
}
