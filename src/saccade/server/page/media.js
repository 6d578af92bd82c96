// Images and videos: read from files, shown small, enlarged on a click.

import { at, iconButton, make } from "./dom.js";

export const MAX_MEDIA = 16;
const MAX_FILE_BYTES = 48 * 1024 * 1024;

/* What a file is to the chat, or throws a sentence that says why it is nothing. */
export async function readMedia(file) {
  const kind = file.type.split("/")[0];
  if (kind !== "image" && kind !== "video") throw new Error(file.name + " is neither an image nor a video.");
  if (file.size > MAX_FILE_BYTES) throw new Error(file.name + " is larger than 48 MiB.");
  if (!file.size) throw new Error(file.name + " is empty.");
  const url = await dataUrl(file);
  const size = kind === "image" ? await imageSize(url) : {};
  const id = crypto.getRandomValues(new Uint32Array(3)).join("-");
  return { id, kind, name: file.name || kind, bytes: file.size, url, ...size };
}

function dataUrl(file) {
  return new Promise((done, fail) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => fail(new Error(file.name + " cannot be read."));
    reader.readAsDataURL(file);
  });
}

/* Nothing for an image that this browser cannot show; the server may still know its format. */
function imageSize(url) {
  return new Promise((done) => {
    const image = new Image();
    image.onload = () => done({ width: image.naturalWidth, height: image.naturalHeight });
    image.onerror = () => done({});
    image.src = url;
  });
}

export function mediaPart(media) {
  if (media.kind === "video") return { type: "video_url", video_url: { url: media.url } };
  return { type: "image_url", image_url: { url: media.url } };
}

/* An image of a message: a button that enlarges it. Videos have the browser's own controls. */
export function showMedia(media) {
  if (!media.url) return make("div", { class: "gone", text: media.name + ": too large to keep in this browser" });
  if (media.kind === "video") return make("video", { src: media.url, controls: true, "aria-label": media.name });
  const image = make("img", { src: media.url, alt: media.name });
  const button = make("button", { type: "button", class: "picture", "aria-label": "Enlarge " + media.name,
    click: () => enlarge(make("img", { src: media.url, alt: media.name }), media.name) }, image);
  const broken = () => make("span", { class: "gone", text: media.name + ": cannot be shown" });
  image.addEventListener("error", () => button.replaceChildren(broken()));
  return button;
}

export function enlarge(content, name) {
  const viewer = at("viewer");
  const close = iconButton("remove", "Close", () => viewer.close());
  viewer.replaceChildren(make("div", { class: "viewer-head" }, make("span", { text: name }), close), content);
  viewer.onclick = (event) => { if (event.target === viewer) viewer.close(); };
  viewer.showModal();
}

export function thumb(media, remove) {
  const shown = media.kind === "video" ? make("video", { src: media.url, muted: true })
    : make("img", { src: media.url, alt: media.name });
  return make("div", { class: "thumb" }, shown, iconButton("remove", "Remove " + media.name, remove));
}
