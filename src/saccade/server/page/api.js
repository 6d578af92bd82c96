// The server as the page sees it: requests with the key of this session, errors as sentences, streams as events.

const KEY = "saccade.key";
const GONE = "The server cannot be reached. It may have been stopped, or the network is down.";
const ODD_KEY = "The API key has characters that no key can have.";
const BROKEN = "The connection to the server broke off before the answer was complete.";

class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

let memory = "";  // where session storage is forbidden
export function key() {
  try { return sessionStorage.getItem(KEY) || ""; } catch { return memory; }
}
export function setKey(value) {
  memory = value;
  try { sessionStorage.setItem(KEY, value); } catch { /* kept in memory */ }
}

export async function get(path, signal) {
  return (await call(path, { cache: "no-store", signal })).json();
}

export async function* chat(body, signal) {
  const whole = { ...body, stream: true, stream_options: { include_usage: true }, timings: true };
  const response = await call("v1/chat/completions", { method: "POST", body: JSON.stringify(whole), signal });
  let isComplete = false;
  for await (const data of events(response)) {
    if (data === "[DONE]") isComplete = true;
    else yield checked(JSON.parse(data));
  }
  if (!isComplete) throw new ApiError(BROKEN);
}

function checked(chunk) {
  if (chunk.error) throw new ApiError(chunk.error.message, chunk.error.code === "invalid_api_key" ? 401 : 0);
  return chunk;
}

async function call(path, options) {
  const own = key();
  const headers = { "content-type": "application/json", ...(own ? { authorization: "Bearer " + own } : {}) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(/headers|ByteString/i.test(error.message) ? ODD_KEY : GONE);
  }
  if (!response.ok) throw await failure(response);
  return response;
}

async function failure(response) {
  let text = "";
  try { text = (await response.json()).error.message; } catch { /* not written by this server */ }
  return new ApiError(text || "The server answered " + response.status + ".", response.status);
}

/* The data of server-sent events; a piece of the network may end anywhere, also inside a character. */
async function* events(response) {
  const reader = response.body.getReader(), decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    let piece;
    try {
      piece = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError(BROKEN);
    }
    if (piece.done) return;
    const lines = (rest + decoder.decode(piece.value, { stream: true })).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data:")) yield line.slice(5).trim();
    }
  }
}
