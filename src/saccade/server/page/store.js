// Conversations, kept in this browser's IndexedDB: a bounded number, with a bounded amount of images.

const NAME = "saccade", VERSION = 1;
export const LIMITS = { conversations: 100, itemBytes: 8 * 2 ** 20, mediaBytes: 128 * 2 ** 20 };

let opened = null;

function open() {
  opened = opened || new Promise((done, fail) => {
    const request = indexedDB.open(NAME, VERSION);
    request.onupgradeneeded = () => {
      request.result.createObjectStore("talks", { keyPath: "id" });
      request.result.createObjectStore("media", { keyPath: "id" });
    };
    request.onsuccess = () => done(request.result);
    request.onerror = () => fail(request.error);
    request.onblocked = () => fail(new Error("another page holds the database"));
  });
  return opened;
}

async function run(mode, work) {
  const database = await open();
  return new Promise((done, fail) => {
    const transaction = database.transaction(["talks", "media"], mode);
    const result = work(transaction.objectStore("talks"), transaction.objectStore("media"));
    transaction.oncomplete = () => done(result?.result ?? result);
    transaction.onabort = transaction.onerror = () => fail(transaction.error);
  });
}

/* Newest first, without their images. */
export async function list() {
  const found = await run("readonly", (talks) => talks.getAll());
  return found.sort((a, b) => b.updated - a.updated);
}

export async function load(id) {
  const talk = await run("readonly", (talks) => talks.get(id));
  if (!talk || !talk.turns) return null;
  for (const item of mediaOf(talk)) {
    item.url = (await run("readonly", (talks, media) => media.get(item.id)))?.url;
  }
  return talk;
}

/* Items that are too large are not kept; they are marked, and the page says so. */
export async function save(talk) {
  const items = mediaOf(talk).filter((item) => item.url && item.bytes <= LIMITS.itemBytes);
  const bare = (turn) => (turn.media || []).map((item) => ({ ...item, url: undefined }));
  const turns = talk.turns.map((turn) => ({ ...turn, media: bare(turn) }));
  await run("readwrite", (talks, media) => {
    for (const item of items) media.put({ id: item.id, url: item.url });
    return talks.put({ ...talk, turns });
  });
  await prune();
}

export async function remove(ids) {
  const doomed = (await list()).filter((talk) => ids.includes(talk.id));
  await run("readwrite", (talks, media) => {
    for (const talk of doomed) {
      talks.delete(talk.id);
      for (const item of mediaOf(talk)) media.delete(item.id);
    }
  });
}

const mediaOf = (talk) => (talk.turns || []).flatMap((turn) => turn.media || []);

/* The oldest conversations go, and the oldest images before them. */
async function prune() {
  const talks = await list();
  if (talks.length > LIMITS.conversations) await remove(talks.slice(LIMITS.conversations).map((talk) => talk.id));
  let bytes = 0;
  const dropped = [];
  for (const talk of talks) {
    for (const item of mediaOf(talk)) {
      bytes += item.bytes <= LIMITS.itemBytes ? item.bytes : 0;
      if (bytes > LIMITS.mediaBytes) dropped.push(item.id);
    }
  }
  if (dropped.length) await run("readwrite", (_, media) => { for (const id of dropped) media.delete(id); });
}
