// Elements, and how values are shown. All text becomes text nodes: nothing of the data is ever parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "polyline", "line", "circle"]);

export function h(tag, attributes, ...children) {
  const node = SVG_TAGS.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (typeof value === "function") {
      node[name] = value;
      (node.handlers ??= []).push(name);
    } else if (value !== null && value !== undefined && value !== false) {
      node.setAttribute(name, value === true ? "" : value);
    }
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export const show = (parent, ...children) =>
  morph(parent, h(parent.nodeName.toLowerCase(), attributesOf(parent), ...children));

const attributesOf = (node) => Object.fromEntries([...node.attributes].map((one) => [one.name, one.value]));

// Brings `old` to what `fresh` is, and keeps the nodes: focus, selection and open details stay where they are.
function morph(old, fresh) {
  if (old.nodeName !== fresh.nodeName || old.id !== fresh.id) return old.replaceWith(fresh);
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  const isOpen = (name) => name === "open" && old.nodeName === "DETAILS";
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name) && !isOpen(name)) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes)
    if (old.getAttribute(name) !== value && !isOpen(name)) old.setAttribute(name, value);
  for (const name of old.handlers ?? []) old[name] = null;
  for (const name of (old.handlers = fresh.handlers) ?? []) old[name] = fresh[name];
  const [mine, wanted] = [[...old.childNodes], [...fresh.childNodes]];
  wanted.forEach((child, at) => (at < mine.length ? morph(mine[at], child) : old.append(child)));
  mine.slice(wanted.length).forEach((child) => child.remove());
}

export function table(name, heads, rows, empty) {
  if (!rows.length) return h("p", { class: "empty" }, empty);
  const isNumber = (head) => head.startsWith("#");
  const cell = (value, at) => h("td", { class: isNumber(heads[at]) ? "number" : null,
    "data-head": heads[at].replace("#", "") }, value ?? "–");
  return h("div", { class: "scroll", role: "region", "aria-label": name, tabindex: 0 },
    h("table", null,
      h("caption", null, name),
      h("thead", null,
        h("tr", null, heads.map((head) => h("th", { scope: "col", class: isNumber(head) ? "number" : null },
        head.replace("#", ""))))),
      h("tbody", null, rows.map((row) => h("tr", null, row.map(cell))))));
}

const NUMBER = new Intl.NumberFormat("en-US", { maximumFractionDigits: 1 });
export const number = (value) => (value === null || value === undefined ? "–" : NUMBER.format(value));
export const many = (count, one, more = `${one}s`) => `${number(count)} ${count === 1 ? one : more}`;
export const rate = (value) => (value === null || value === undefined ? "unknown" : `${number(value)} cells/s`);

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 10) return `${NUMBER.format(seconds)} s`;
  const [s, min, hours] = [Math.round(seconds), Math.floor(seconds / 60), Math.floor(seconds / 3600)];
  if (s < 120) return `${s} s`;
  if (min < 120) return `${min} min`;
  return hours < 48 ? `${hours} h ${min % 60} min` : `${number(Math.floor(hours / 24))} days`;
}

export function size(bytes) {
  if (bytes < 1024) return many(bytes, "byte");
  return bytes < 1 << 20 ? `${number(bytes / 1024)} KiB` : `${number(bytes / (1 << 20))} MiB`;
}

export const time = (text) => (text ? h("time", { datetime: text, title: text }, text.slice(0, 19).replace("T", " "))
  : "–");

// A word with its colour, for people who see no colours, too.
export const GOOD = new Set(["running", "active", "healthy", "done", "yes", "closed"]);
export const BAD = new Set(["stopped", "failed", "tripped", "no", "master_down", "open", "error", "killed", "hung"]);
export const state = (word) => h("span", { class: `state ${GOOD.has(word) ? "good" : BAD.has(word) ? "bad" : "warn"}` },
  String(word).replaceAll("_", " "));

const SPARK_S = 900;

// Draws values at their times. The right edge is the newest one.
export function spark(times, values, says, width = 200, height = 36) {
  const known = values.filter((value) => value !== null);
  if (known.length < 2) return h("p", { class: "spark empty" }, "no samples yet");
  const [low, high] = [Math.min(0, ...known), Math.max(...known)];
  const x = (time) => (1 - (times.at(-1) - time) / SPARK_S) * width;
  const y = (value) => height - 2 - ((value - low) / (high - low || 1)) * (height - 4);
  const point = (value, at) => [x(times[at]), y(value)].map((one) => one.toFixed(1)).join(",");
  const runs = [[]];
  values.forEach((value, at) => (value === null ? runs.push([]) : runs.at(-1).push(point(value, at))));
  return h("svg", { class: "spark", role: "img", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none",
    "aria-label": says(known) },
    runs.filter((run) => run.length).map((run) => h("polyline", { points: run.join(" ") })));
}

export function copier(text, label) {
  const button = h("button", { type: "button", class: "small", onclick: async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      button.replaceWith(h("input", { readonly: true, value: text, "aria-label": label }));
        // without TLS browsers refuse
      return;
    }
    setTimeout(() => (button.textContent = label), 1500);
  } }, label);
  return button;
}

// What an error says, without the way to it.
export const summary = (error) => (error ?? "").trim().split("\n").at(-1).slice(0, 300);

// A part of a sentence that is left out where there is nothing to say.
export const also = (start, text) => (text ? `${start}${text}` : "");

// A sentence of ours, whose commands are between backticks.
export const prose = (text) => text.split("`").map((part, at) => (at % 2 ? h("code", null, part) : part));

export const link = (place, ...text) => h("a", { href: place }, ...text);
export const place = (...parts) => `#/${parts.map((part) => encodeURIComponent(String(part))).join("/")}`;
