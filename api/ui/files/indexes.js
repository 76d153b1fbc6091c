// Indexes: what each is, how far it is, what doesn't fit, and a form that queries it.

import { call, curl, pretty } from "./api.js";
import { copier, duration, h, link, many, number, place, prose, show, state, table, time } from "./dom.js";
import { button, faults, order, would } from "./orders.js";

const COMPARISONS = { eq: "is", ne: "is not", lt: "below", lte: "at most", gt: "above", gte: "at least",
  in: "one of (commas)", prefix: "begins with", isnull: "is null (true, false)" };

export const mount = (root, parts, context) => (parts.length ? one(root, parts[0], context) : all(root, context));

function all(root, { datastore, watch, isAdmin }) {
  const [list, top] = [h("div"), h("h1", null, `Indexes of ${datastore}`)];
  return watch({ view: "overview" }, ({ indexes }) => {
    if (!list.isConnected) root.append(top, list);
    if (indexes.problem) return show(list, h("p", { class: "problem" }, indexes.problem));
    const heads = ["name", "state", "built", "#problems", "found by", "reason"];
    const row = (index) => [
      link(place("indexes", datastore, index.name), index.name), state(index.state), built(index),
      number(index.problems), index.definition.shard_field, prose(index.what_to_do ?? index.reason ?? ""),
    ];
    const none = `There is no index.${isAdmin ? " `schemaless index create` makes one." : ""}`;
    show(list, table("Indexes", heads, indexes.indexes.map(row), prose(none)));
  });
}

export function built({ progress }) {
  if (!progress) return "whole";
  if (progress.done === null) return "unknown while a master is away";
  const share = progress.total ? `${number((100 * progress.done) / progress.total)} %` : "its tables are being made";
  return `${share}${progress.eta_s === null ? "" : `, about ${duration(progress.eta_s)} to go`}`;
}

const behind = ({ lag }) => (lag === undefined || lag === null ? null : many(lag, "cell"));

function one(root, name, context) {
  const { datastore, watch } = context;
  const gone = new AbortController();
  const path = `v1/${datastore}/indexes/${encodeURIComponent(name)}`;
  const [facts, query, misfits] = [h("div"), h("div"), h("div")];
  let shape = null;
  const close = watch({ view: "index", of: name }, (index) => {
    if (!shape) root.append(h("h1", null, `Index ${name}`), facts, query, misfits);
    show(facts, details(index, path, context));
    const before = shape;
    shape = pretty(index.definition);
    if (shape === before) return;
    form(query, index, path, datastore, gone.signal);
    problems(misfits, path, datastore, gone.signal);
  });
  return () => {
    gone.abort();
    close();
  };
}

function details(index, path, { datastore, isAdmin }) {
  const type = (field) => field.type + (field.length ? `(${field.length})` : "");
  const fields = (kind, word) =>
    (index.definition[kind] ?? []).map((field) => [field.name, word, field.column, field.path, type(field)]);
  const versions = index.versions.map((one) => [
    number(one.number), one.role, state(one.state), built(one), behind(one), number(one.problems),
    one.kept_until ? time(one.kept_until) : null,
  ]);
  const waits = index.waiting_shards ?? [];
  const where = index.definition.where && pretty(index.definition.where).replace(/\s+/g, " ");
  const { cleaner } = index;
  return [
    h("p", null, state(index.state), " ", index.reason ?? ""),
    index.what_to_do ? h("p", { class: "note" }, prose(index.what_to_do)) : null,
    index.progress?.total
      ? h("progress", { max: index.progress.total, value: index.progress.done, "aria-label": "Progress of the build" })
      : null,
    h("p", null,
      `Built: ${built(index)}. Behind: ${behind(index) ?? "unknown"}. `,
      index.cells_per_s ? `At most ${number(index.cells_per_s)} cells/s.` : ""),
    cleaner ? h("p", null, `Compared with its cells${cleaner.compared_since ? " since " : ": not yet"}`,
      cleaner.compared_since ? time(cleaner.compared_since) : "",
      `. Found in all: ${faults(cleaner.total)}.`) : null,
    waits.length
      ? table("Shards that wait", ["#shard", "reason"],
        waits.map((one) => [link(place("shards", datastore, one.shard), one.shard), one.reason]), "")
      : null,
    isAdmin ? h("div", { class: "row" }, orders(index, path, datastore)) : null,
    table("Versions", ["number", "role", "state", "built", "#behind", "#problems", "kept until"], versions, ""),
    table(`Fields, found by ${index.definition.shard_field}`, ["field", "kind", "column", "path", "type"],
      [...fields("fields", "keyed"), ...fields("stored", "stored")], ""),
    where ? h("p", null, "Only where ", h("code", null, where)) : null,
  ];
}

function orders(index, path, datastore) {
  const { name } = index;

  // An order whose dry run says what it would touch. `body` makes the payload of what was given, and may refuse it.
  function offered(title, says, { action = title.toLowerCase(), method = "POST", body = () => undefined, show: shown =
    ({ would: touched }) => would(touched), fields, danger }) {
    const ask = (given, dry_run) =>
      call(method, method === "DELETE" ? path : `${path}/${action}`, { query: { dry_run }, body: body(given) });
    return button(title, () => order({
      title: `${title}: ${name}`, label: title, says, fields, danger, datastore,
      preview: async (given) => shown(await ask(given, true)),
      run: (given) => ask(given, false),
    }), danger);
  }

  const check = (title, says) => offered(title, says, {
    fields: [{ name: "rows_per_s", text: "Rows a second at most (empty: no bound)", kind: "number" }],
    body: ({ rows_per_s }) => (rows_per_s ? { rows_per_s: Number(rows_per_s) } : {}),
    show: ({ matched, waits_for }) => [h("p", null, `${many(matched, "shard")} would be compared.`),
      waits_for ? h("p", { class: "note" }, "It would wait: ", prose(waits_for)) : ""],
  });
  const isHalted = index.state === "paused" || index.state === "failed";
  const versions = index.versions.map((one) => String(one.number));
  return [
    isHalted ? offered("Resume", "Indexers work on it again, from where it is.", {})
      : offered("Pause", "No indexer works on it until it is resumed. It answers queries on. "
        + `It is ${behind(index) ?? "?"} behind now.`, {}),
    offered("Throttle", "Each indexer process delivers at most so many cells a second to it.", {
      fields: [{ name: "cells_per_s", text: "Cells a second (0: no bound)", kind: "number", required: true,
        value: index.cells_per_s ?? 0 }],
      body: ({ cells_per_s }) => ({ cells_per_s: Number(cells_per_s) }),
    }),
    check("Verify", "Each entry is compared with its cells, on masters and minions. Nothing is changed."),
    check("Repair",
      "Each entry is compared with its cells. Entries on masters that differ are brought to what the cells say."),
    versions.length > 1 ? offered("Switch", `Another version answers. Now version ${index.number} does.`, {
      fields: [{ name: "version", text: "Version", options: versions }],
      body: ({ version }) => ({ version: Number(version) }),
      show: ({ would: touched }) => h("p", null, `Version ${touched.versions} would answer.`),
    }) : null,
    offered("Drop", `All versions and entries of ${name} are deleted. Cells stay. Type its name to confirm.`, {
      method: "DELETE", danger: true, fields: [{ name: "name", text: "Name", required: true }],
      body: (given) => {
        if (given.name !== name) throw new Error("That is not its name.");
      },
    }),
  ];
}

function form(root, index, path, datastore, signal) {
  const { definition } = index;
  const result = h("div", { "aria-live": "polite" });
  const conditions = definition.fields.map((field) => condition(field, field.name === definition.shard_field));
  const flags = Object.entries({ desc: "highest first", verify: "verify with the cells", explain: "explain" })
    .map(([name, text]) => [name, h("input", { type: "checkbox", id: `query-${name}` }), text]);
  const limit = h("input", { id: "query-limit", type: "number", min: 1, max: 1000, value: 50 });
  const include = h("input", { id: "query-include", placeholder: "BASE, STATUS" });

  const asked = (cursor) => ({
    limit: limit.value, include: include.value.replace(/\s/g, ""), cursor,
    ...Object.fromEntries(flags.map(([name, box]) => [name, box.checked && "true"])),
    ...Object.fromEntries(conditions.map((one) => one.term()).filter(([, value]) => value)),
  });

  async function run(cursor = "", before = []) {
    try {
      const found = await call("GET", `${path}/entries`, { query: asked(cursor), signal });
      const entries = [...before, ...found.entries];
      result.replaceChildren(
        ...answer(entries, found, definition, datastore),
        copier(curl(`${path}/entries`, asked("")), "Copy as curl"),
        found.cursor ? button("More entries", () => run(found.cursor, entries)) : "");
    } catch (error) {
      if (error.name === "AbortError") return;
      const hint = error.hint ? [" (", prose(error.hint), ")"] : "";
      result.replaceChildren(h("p", { class: "problem", role: "alert" }, error.message, hint));
    }
  }

  const ask = (event) => {
    event.preventDefault();
    run();
  };
  root.replaceChildren(
    h("h2", null, "Query"),
    h("form", { class: "query", onsubmit: ask },
      conditions.map((one) => one.row),
      h("div", { class: "row" },
        h("label", { for: limit.id }, "at most"), limit,
        h("label", { for: include.id }, "with the newest cells of"), include,
        flags.map(([, box, text]) => h("label", { for: box.id }, box, text)),
        h("button", { class: "main" }, "Query"))),
    result);
}

// One field of the form. `term` returns the parameter that it stands for: its name, and its value, which may be empty.
function condition(field, isShard) {
  const comparisons = Object.entries(COMPARISONS).filter(([comparison]) => !isShard || comparison === "eq");
  const choice = h("select", { "aria-label": `Comparison of ${field.name}` },
    comparisons.map(([comparison, text]) => h("option", { value: comparison }, text)));
  const value = h("input", { id: `field-${field.name}`, required: isShard, placeholder: field.type });
  const name = () => (choice.value === "eq" ? field.name : `${field.name}.${choice.value}`);
  return {
    row: h("div", { class: "row" }, h("label", { for: value.id }, field.name), choice, value),
    term: () => [name(), value.value],
  };
}

function answer(entries, found, definition, datastore) {
  const fields = [...definition.fields, ...(definition.stored ?? [])].map((field) => field.name);
  const columns = Object.keys(entries[0]?.cells ?? {});
  const { freshness } = found;
  const cell = (one) => h("code", { class: "clip" }, text(one?.body)?.replace(/\s+/g, " ").slice(0, 200) ?? "–");
  const row = (entry) => [
    link(place("cells", datastore, entry.row_key), entry.row_key),
    ...fields.map((name) => text(entry.fields[name])), ...columns.map((column) => cell(entry.cells[column])),
  ];
  return [
    h("p", { class: "said" },
      `${many(entries.length, "entry", "entries")}${found.cursor ? " so far" : ""} of version ${found.version}. `,
      freshness.behind_cells === null ? "Nobody knows how far it is behind."
        : `It is ${many(freshness.behind_cells, "cell")} behind.`,
      found.dropped ? ` ${number(found.dropped)} were left out, because their cells say otherwise.` : ""),
    table("Entries", ["row", ...fields, ...columns], entries.map(row), "No entry matches."),
    ...(found.explain ?? []).map((one) =>
      h("pre", { class: "body", tabindex: 0, "aria-label": "Explanation" }, pretty(one))),
  ];
}

function text(value) {
  if (value === null || value === undefined) return null;
  return typeof value === "string" ? value : pretty(value);
}

async function problems(root, path, datastore, signal, cursor = "", before = []) {
  try {
    const found = await call("GET", `${path}/problems`, { query: { limit: 50, cursor }, signal });
    const all = [...before, ...found.problems];
    const row = (one) => [
      link(place("cells", datastore, one.row_key), one.row_key), one.column_name, one.field,
      h("code", { class: "clip" }, one.value), one.reason,
    ];
    root.replaceChildren(
      h("h2", null, `Values that don't fit: ${number(found.count)}`),
      table("Values that don't fit", ["row", "column", "field", "value", "reason"], all.map(row),
        "Every value fits its field."),
      found.cursor ? button("More", () => problems(root, path, datastore, signal, found.cursor, all)) : "");
  } catch (error) {
    if (error.name !== "AbortError") root.replaceChildren(h("p", { class: "problem" }, error.message));
  }
}
