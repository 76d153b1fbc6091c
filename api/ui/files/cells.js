// One row: its columns, versions and their differences, and its timeline.

import { call, curl, isObject, pretty } from "./api.js";
import { also, copier, h, link, many, number, place, show, size, state, summary, table, time } from "./dom.js";

const CLIP = 4000;
const CHANGES_MAX = 200;
const UUID = /^[0-9a-f]{8}-?([0-9a-f]{4}-?){3}[0-9a-f]{12}$/i;

export function mount(root, parts, context) {
  const gone = new AbortController();
  const field = h("input", { id: "row", value: parts[0] ?? "", placeholder: "row key, or SHARD:GENERATION:ADDED_ID",
    size: 44, spellcheck: "false" });
  const result = h("div", { "aria-live": "polite" });
  const ask = (event) => {
    event.preventDefault();
    find(field.value.trim());
  };
  root.append(
    h("h1", null, `Cells of ${context.datastore}`),
    h("form", { class: "row", onsubmit: ask },
      h("label", { for: "row" }, "Row or location"), field, h("button", { class: "main" }, "Find")),
    result);

  async function find(text) {
    if (UUID.test(text)) return go(text);
    try {
      const query = { location: text, limit: 1 };
      go((await call("GET", `v1/${context.datastore}/explain`, { query, signal: gone.signal })).row_key);
    } catch (error) {
      failed(result, error);
    }
  }

  function go(key) {
    const to = place("cells", context.datastore, key);
    if (location.hash === to) row(result, key, context.datastore, gone.signal);
    else location.hash = to;
  }

  if (parts[0]) row(result, parts[0], context.datastore, gone.signal);
  else result.append(h("p", { class: "empty" },
    "Type a row key, such as a trip's, or the location that a put answered."));
  return () => gone.abort();
}

function failed(node, error) {
  if (error.name === "AbortError") return;
  node.replaceChildren(h("p", { class: "problem", role: "alert" }, `${error.message}${also(". ", error.hint)}`));
}

async function row(root, key, datastore, signal) {
  const path = `v1/${datastore}/cells/${encodeURIComponent(key)}`;
  let found;
  try {
    found = await call("GET", path, { signal });
  } catch (error) {
    return failed(root, error);
  }
  const versions = h("div");
  const timeline = h("div");
  const cells = Object.values(found.cells);
  const heads = ["column", "#ref key", "location", "written", "#size as shown", "versions"];
  const line = (cell) => [
    cell.column_name, String(cell.ref_key), where(datastore, cell), time(cell.created_at),
    cell.erased ? state("erased") : size(pretty(cell.body).length),
    h("button", {
      type: "button", class: "small", "aria-label": `Versions of ${cell.column_name}`,
      onclick: () => column(versions, path, cell.column_name, datastore, signal),
    }, "Versions"),
  ];
  root.replaceChildren(
    h("h2", null, "Row ", h("code", null, found.row_key)),
    h("p", { class: "row" }, link(place("shards", datastore, cells[0].shard), `shard ${cells[0].shard}`),
      copier(curl(path), "Copy as curl"),
      copier(curl(`v1/${datastore}/explain`, { row_key: key }), "Copy the explanation as curl")),
    table("Columns, each with its newest version", heads, cells.map(line), "The row has no cell."),
    versions, h("h2", null, "Timeline"), timeline);
  if (cells.length) column(versions, path, cells[0].column_name, datastore, signal);
  explain(timeline, datastore, key, signal);
}

function where(datastore, { buffered, shard, generation, added_id }) {
  if (buffered) return state("buffered");
  const at = `${generation}:${added_id}`;
  return link(place("shards", datastore, shard, at), `${shard}:${at}`);
}

async function column(root, path, name, datastore, signal) {
  const at = `${path}/${encodeURIComponent(name)}/versions`;
  const shown = [];
  async function more(to) {
    try {
      const page = await call("GET", at, { query: { order: "desc", limit: 10, to }, signal });
      shown.push(...page.cells);
      root.replaceChildren(
        h("h2", null, `Versions of ${name}`),
        ...shown.map((cell, at) => version(cell, shown[at + 1], datastore, at === 0, path)),
        page.next === null ? h("p", { class: "empty" }, "That is the first version.")
          : h("button", { type: "button", onclick: () => more(String(page.next)) }, "Earlier versions"));
    } catch (error) {
      failed(root, error);
    }
  }
  await more("");
}

function version(cell, before, datastore, isFirst, path) {
  const isCompared = before && !before.erased && !cell.erased;
  const changes = isCompared ? differences(before.body, cell.body) : [];
  const compared = isCompared ? ` ${many(changes.length, "difference")} from ${before.ref_key}` : "";
  const row = ([member, old, now]) => [member, value(old), value(now)];
  return h("details", { class: "version", open: isFirst },
    h("summary", null, `ref key ${cell.ref_key} `, time(cell.created_at), compared),
    h("p", { class: "row" },
      where(datastore, cell), also("caused by ", cell.cause), also("trace ", cell.trace?.split("-")[0]),
      copier(curl(`${path}/${cell.column_name}/${cell.ref_key}`), "Copy as curl"),
      cell.erased ? null : copier(pretty(cell.body), "Copy the body")),
    changes.length
      ? table(`Differences from ref key ${before.ref_key}`, ["member", "before", "now"],
        changes.slice(0, CHANGES_MAX).map(row), "")
      : null,
    changes.length > CHANGES_MAX ? h("p", null, `and ${number(changes.length - CHANGES_MAX)} more`) : null,
    cell.erased ? h("p", { class: "empty" }, "Erased ", time(cell.erased.erased_at), ` by ${cell.erased.erasure}.`)
      : body(cell.body));
}

const value = (one) => (one === undefined ? h("span", { class: "empty" }, "none")
  : h("code", { class: "clip" }, pretty(one).slice(0, 300)));

// A body may have 1 MiB. Only its beginning is laid out before somebody asks for all of it.
export function body(document) {
  const text = pretty(document);
  const shown = h("pre", { class: "body", tabindex: 0, "aria-label": "Body" }, text.slice(0, CLIP));
  if (text.length <= CLIP) return shown;
  const showAll = () => {
    shown.textContent = text;
    all.remove();
  };
  const all = h("button", { type: "button", class: "small", onclick: showAll }, `Show all ${size(text.length)}`);
  return h("div", null, shown, all);
}

function differences(old, now, at = "", found = []) {
  if (isObject(old) && isObject(now) && Array.isArray(old) === Array.isArray(now)) {
    for (const name of new Set([...Object.keys(old), ...Object.keys(now)])) {
      const inner = Array.isArray(now) ? `${at}[${name}]` : at ? `${at}.${name}` : name;
      if (!Object.hasOwn(old, name)) found.push([inner, undefined, now[name]]);
      else if (!Object.hasOwn(now, name)) found.push([inner, old[name], undefined]);
      else differences(old[name], now[name], inner, found);
    }
  } else if (pretty(old) !== pretty(now)) found.push([at, old, now]);
  return found;
}

async function explain(root, datastore, key, signal) {
  let told;
  try {
    told = await call("GET", `v1/${datastore}/explain`, { query: { row_key: key, limit: 200 }, signal });
  } catch (error) {
    return failed(root, error);
  }
  let isFull = false;
  const list = h("ol", { class: "timeline" });
  const line = (event) => h("li", { class: event.kind },
    time(event.at), h("strong", null, event.kind.replaceAll("_", " ")), h("span", null, says(event)));
  const draw = () => show(list, events(told, isFull).map(line));
  const choose = (event) => {
    isFull = event.target.checked;
    draw();
  };
  const choice = h("label", null, h("input", { type: "checkbox", onchange: choose }), "every attempt and every copy");
  const waits = told.waits.map((one) => h("li", null, `${one.for} at ${one.cell}: ${one.why}`));
  const unheard = ([cluster, why]) => h("p", { class: "problem" }, `Cluster ${cluster} couldn't be asked: ${why}`);
  root.replaceChildren(
    choice, told.earlier ? h("p", { class: "empty" }, "Earlier cells are left out.") : "", list,
    h("h3", null, "What it waits for"),
    waits.length ? h("ul", null, waits) : h("p", { class: "empty" }, "It waits for nothing."),
    ...told.programs.map((one) => program(datastore, one)),
    ...told.indexes.map((one) => index(datastore, one)),
    ...Object.entries(told.unknown).map(unheard));
  draw();
}

// The compact timeline joins the failed calls of one cell, and leaves out copies in buffers that are at home.
function events(told, isFull) {
  if (isFull) return told.events;
  const [shown, calls] = [[], new Map()];
  for (const event of told.events) {
    if (event.at_home) continue;
    if (event.kind !== "failed_call") shown.push(event);
    else {
      const cell = `${event.location} ${event.program} ${event.trigger}`;
      const first = calls.get(cell) ?? { ...event, times: 0 };
      if (!first.times) shown.push(first);
      first.times += 1;
      calls.set(cell, first);
    }
  }
  return shown;
}

function says(event) {
  const called = `${event.location} in ${event.program}/${event.trigger}`;
  const [key, attempts] = [`${event.column_name} ${event.ref_key}`, many(event.attempts, "attempt")];
  switch (event.kind) {
    case "cell":
      return `${event.location}: ${key}${also(", caused by ", event.cause)}${also(", trace ", event.trace)}`
        + also(", erased by ", event.erased?.erasure);
    case "erasure": return `${event.location}: ${event.erasure} erased ${many(event.cells, "cell")}`;
    case "buffered": return `${key} on cluster ${event.cluster}${also(", refused by its home: ", event.refused)}`;
    case "diverged":
      return `${key} was written by ${event.server} in epoch ${event.epoch}, and never reached its minions. `
        + (event.outcome ? `It was put again: ${event.outcome}` : "It waits");
    case "failed_call":
      return `${called}, ${event.times > 1 ? many(event.times, "time") : `attempt ${event.attempt}`}`;
    case "parked": return `${called}, ${event.cause} after ${attempts}: ${summary(event.error)}`;
    case "waiting": return `${called}, after ${attempts}: ${summary(event.error)}`;
    case "unparked": return `${called}: ${event.ending}`;
    default: return `${called} by ${event.who}${event.reason ? `: ${event.reason}` : ""}`;
  }
}

function program(datastore, one) {
  const done = one.checkpoint ? `${many(one.finished, "cell")} of the row finished by ${one.checkpoint.location}`
    : "It has not begun this shard";
  const heads = ["location", "column", "#ref key", "state", "why"];
  const row = (cell) => [cell.location, cell.column_name, String(cell.ref_key), state(cell.state), cell.why];
  return h("section", null,
    h("h3", null, "Program ", link(place("triggers", datastore, one.program), one.program), " ", state(one.state)),
    h("p", null, `${done}${also(". ", one.reason)}`),
    one.unfinished.length ? table(`Unfinished in ${one.program}`, heads, one.unfinished.map(row), "") : null);
}

function index(datastore, one) {
  const entry = ({ shard, fields }) => h("li", null,
    `entry in shard ${shard}: `, h("code", null, pretty(fields).replace(/\s+/g, " ")));
  return h("section", null,
    h("h3", null, "Index ", link(place("indexes", datastore, one.name), one.name), " ", state(one.state)),
    h("ul", null, one.entries.map(entry)),
    one.why ? h("p", null, one.why) : null);
}
