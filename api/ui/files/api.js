// What the page asks of the API. The token stays in this tab, and goes in a header: never in a cookie or an address.

const ROOT = new URL("../../", import.meta.url);
const KEY = "schemaless token";

export const token = {
  get: () => sessionStorage.getItem(KEY),
  set: (text) => (text ? sessionStorage.setItem(KEY, text) : sessionStorage.removeItem(KEY)),
};

export class Problem extends Error {
  constructor(document, status) {
    super(document.detail ?? document.title ?? `status ${status}`);
    Object.assign(this, { document, status, hint: document.hint });
  }
}

// A number whose text JavaScript would change, such as 9007199254740993 or 1.0, is kept as its text.
class Literal {
  constructor(source) { this.source = source; }
  toString() { return this.source; }
}

const exact = (key, value, context) => (typeof value === "number" && context && String(value) !== context.source
  ? new Literal(context.source) : value);

export function pretty(value, indent = "") {
  const inner = `${indent}  `;
  if (value instanceof Literal) return value.source;
  if (Array.isArray(value)) return value.length
    ? `[\n${value.map((one) => inner + pretty(one, inner)).join(",\n")}\n${indent}]` : "[]";
  if (value === null || typeof value !== "object") return JSON.stringify(value);
  const members = Object.entries(value).map(([name, one]) => `${inner}${JSON.stringify(name)}: ${pretty(one, inner)}`);
  return members.length ? `{\n${members.join(",\n")}\n${indent}}` : "{}";
}

export const isObject = (value) => value !== null && typeof value === "object" && !(value instanceof Literal);

const headers = (more) => ({ ...(token.get() ? { authorization: `Bearer ${token.get()}` } : {}), ...more });

export function address(path, query) {
  const url = new URL(path, ROOT);
  for (const [name, value] of Object.entries(query ?? {})) if (value !== "" && value !== null && value !== undefined
    && value !== false) url.searchParams.set(name, value);
  return url;
}

function problemOf(text, status) {
  try {
    return new Problem(JSON.parse(text), status);
  } catch {
    return new Problem({ detail: `the API answered with status ${status}` }, status);
  }
}

const SILENT = new Problem({ detail: "the API doesn't answer" }, 0);
const CALL_MAX_MS = 30_000;

export async function call(method, path, { query, body, signal } = {}) {
  const more = body === undefined ? {} : { "content-type": "application/json" };
  const ends = AbortSignal.any([AbortSignal.timeout(CALL_MAX_MS), ...(signal ? [signal] : [])]);
  let [response, text] = [];
  try {
    response = await fetch(address(path, query), { method, signal: ends, headers: headers(more),
      body: body === undefined ? undefined : JSON.stringify(body) });
    text = await response.text();
  } catch (error) {
    throw error.name === "AbortError" ? error : SILENT;
  }
  if (!response.ok) {
    const problem = problemOf(text, response.status);
    if (response.status === 401) window.dispatchEvent(new CustomEvent("signedout", { detail: problem }));
    throw problem;
  }
  return JSON.parse(text, exact);
}

export function curl(path, query) {
  const asked = token.get() ? ` -H "Authorization: Bearer $SCHEMALESS_TOKEN"` : "";
  return `curl${asked} '${String(address(path, query)).replaceAll("'", "%27")}'`;
}

// The same request would be refused again.
const FINAL = new Set([400, 401, 403, 404, 409, 422]);
export const isFinal = (error) => FINAL.has(error.status);
const PAUSE_MAX_MS = 5000;
const SILENCE_MAX_MS = 25_000; // two heartbeats and a half

// Follows server-sent events until `close`. EventSource can't be used: it sends no headers. While the tab is hidden it
// follows nothing, because a browser opens six connections to a server and no more.
export function follow(path, query, { event, told }) {
  let [stop, pause, lastId, isClosed, silence] = [new AbortController(), 500, null, false, 0];

  function heard() {
    clearTimeout(silence);
    silence = setTimeout((one) => one.abort(SILENT), SILENCE_MAX_MS, stop);
  }

  async function run() {
    while (!isClosed) {
      if (document.hidden) await new Promise((seen) => document.addEventListener("visibilitychange", seen,
        { once: true }));
      if (isClosed) return;
      stop = new AbortController();
      heard();
      let why = null;
      try {
        const response = await fetch(address(path, query),
          { headers: headers({ accept: "text/event-stream", ...(lastId ? { "last-event-id": lastId } : {}) }),
          signal: stop.signal });
        if (!response.ok) throw problemOf(await response.text(), response.status);
        told("connected");
        pause = 500;
        await read(response.body.getReader());
      } catch (error) {
        if (isClosed) return;
        why = error;
        if (isFinal(error)) {
          if (error.status === 401) window.dispatchEvent(new CustomEvent("signedout", { detail: error }));
          return told("refused", error);
        }
      } finally {
        clearTimeout(silence);
      }
      if (isClosed || document.hidden) continue;
      told("away", why);
      await new Promise((over) => setTimeout(over, pause));
      pause = Math.min(PAUSE_MAX_MS, pause * 2);
    }
  }

  async function read(reader) {
    const decoder = new TextDecoder();
    for (let rest = "";;) {
      const { done, value } = await reader.read();
      heard();
      if (done || isClosed) return;
      const chunks = (rest + decoder.decode(value, { stream: true })).split("\n\n");
      rest = chunks.pop();
      for (const chunk of chunks) {
        const fields = Object.fromEntries(chunk.split("\n").map((line) => [line.slice(0, line.indexOf(":")),
          line.slice(line.indexOf(":") + 2)]));
        lastId = fields.id ?? lastId;
        if (fields.event && !isClosed) event(fields.event, JSON.parse(fields.data, exact));
      }
    }
  }

  const hidden = () => document.hidden && stop.abort();
  document.addEventListener("visibilitychange", hidden);
  run();
  return () => {
    isClosed = true;
    document.removeEventListener("visibilitychange", hidden);
    stop.abort();
  };
}
