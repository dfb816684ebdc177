// Data of the server, or of the page itself if it was exported.

const element = document.getElementById("stored");
const stored = element ? JSON.parse(element.textContent) : null;
const received = new Map();

/** Whether this page is an exported file, which has the data of one view and no server. */
export const isExported = stored !== null;

/** The view that an exported page shows. */
export const exportedHash = stored?.hash ?? "";

function address(path, parameters) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters ?? {})) {
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== null && each !== undefined && each !== "") query.append(name, each);
    }
  }
  return query.size ? `/api/${path}?${query}` : `/api/${path}`;
}

/** Request JSON from the server. Fails with an Error that has the server's message. */
export async function get(path, parameters) {
  const url = address(path, parameters);
  if (stored) {
    if (url in stored.data) return stored.data[url];
    throw new Error("This exported page does not contain that.");
  }
  const response = await fetch(url).catch(() => { throw new Error("The viewer was stopped. Start it again: quintet view"); });
  const data = await response.json().catch(() => ({ error: response.statusText }));
  if (!response.ok) throw new Error([data.error, data.hint].filter(Boolean).join("; "));
  received.set(url, data);
  return data;
}

/** Return the URL of an image of an episode. */
export function imageUrl(run, split, name) {
  const url = address("image", { run, split, name });
  if (stored) return stored.images[url] ?? "";
  return url;
}

/** Return the URL of a video of a run; an exported page has none. */
export function videoUrl(run, name) {
  return stored ? "" : address("video", { run, name });
}

/** Forget what was received for the view before. */
export function forget() {
  received.clear();
}

/** Return all data received for this view, by URL. */
export function receivedData() {
  return Object.fromEntries(received);
}
