// Trigger programs: how far each is, what fails, and the cells that it parked.

import { call, curl } from "./api.js";
import { body } from "./cells.js";
import { also, copier, duration, h, link, many, number, place, prose, rate, show, state, summary, table, time }
  from "./dom.js";
import { button, order, would } from "./orders.js";

const CAUSES = ["error", "verdict", "killed", "hung", "waiting", "behind"];
const PAGE = 50;

export const mount = (root, parts, context) => (parts.length ? one(root, parts[0], context) : all(root, context));

function all(root, { datastore, watch }) {
  const [list, top] = [h("div"), h("h1", null, `Trigger programs of ${datastore}`)];
  return watch({ view: "overview" }, ({ triggers }) => {
    if (!list.isConnected) root.append(top, list);
    if (triggers.problem) return show(list, h("p", { class: "problem" }, triggers.problem));
    const heads = ["program", "state", "#workers", "#rate", "#behind", "#oldest", "#parked", "#failing", "reason"];
    const row = (program) => [
      link(place("triggers", datastore, program.program), program.program), state(program.stall ?? program.state),
      number(program.worker_count), rate(program.rate), many(program.lag, "cell"), duration(program.lag_seconds),
      number(program.parked), number(program.failing_count), program.reason ?? "",
    ];
    const none = "No program has run here yet. `schemaless triggers run` runs one.";
    show(list, table("Programs", heads, triggers.triggers.map(row), prose(none)));
  });
}

function one(root, name, context) {
  const { datastore, watch } = context;
  const gone = new AbortController();
  const path = `v1/${datastore}/triggers/${encodeURIComponent(name)}`;
  const [facts, kept] = [h("div"), h("div")];
  let counted = null;
  const close = watch({ view: "trigger", of: name }, (program) => {
    if (!counted) root.append(h("h1", null, `Program ${name}`), facts, kept);
    show(facts, details(program, path, context));
    counted ??= parked(kept, name, path, context, gone.signal);
    counted(program.parked);
  });
  return () => {
    gone.abort();
    close();
  };
}

const unknown = (what) =>
  Object.entries(what).map(([cluster, why]) => h("p", { class: "problem" }, `Cluster ${cluster}: ${why}`));

function details(program, path, { datastore, isAdmin }) {
  const { counts } = program;
  const late = program.shards.filter((one) => one.state !== "running" || one.lag || one.seek);
  const causes = Object.entries(program.failures).map(([cause, count]) => `${cause} (${number(count)})`);
  return [
    h("p", null, state(program.stall ?? program.state), " ", program.reason ?? ""),
    h("p", null,
      `${many(program.worker_count, "worker")}, ${rate(program.rate)}, ${many(program.lag, "cell")} behind`,
      program.lag ? `, the oldest for ${duration(program.lag_seconds)}` : "", `, ${number(program.parked)} parked.`),
    h("p", null,
      `Of ${many(counts.seen, "cell")} seen: `,
      ["called", "filtered", "skipped", "parked", "waiting"].map((one) => `${number(counts[one])} ${one}`).join(", ")),
    ...unknown(program.unknown), ...unknown(program.masters_away),
    isAdmin ? h("div", { class: "row" }, orders(program, path, datastore)) : null,
    h("h2", null, "Failing now"),
    h("p", { class: "problem" }, also(`Of ${many(program.calls, "call")} in ten seconds failed: `, causes.join(", "))),
    table("Cells whose call failed, and that are called again", ["cell", "function", "attempt", "again at", "error"],
      program.workers.flatMap(({ failing }) => failing).map((one) => [
        one.location, one.trigger, `${one.attempt} of ${one.attempts}`, time(one.again_at), summary(one.error),
      ]), "No call fails now."),
    h("h2", null, "Workers"),
    table("Processes", ["process", "partitions", "#rate", "state", "oldest call", "#seen"],
      program.workers.map(worker), "No worker runs it."),
    h("h2", null, "Shards"),
    table("Shards with something to do", ["#shard", "at", "#behind", "state", "seek to", "reason"],
      late.slice(0, 200).map((one) => [
        link(place("shards", datastore, one.shard), one.shard), `${one.generation}:${one.added_id}`,
        one.lag === null ? "unknown" : many(one.lag, "cell"), state(one.state), one.seek, one.reason ?? "",
      ]),
      `All ${many(program.shards.length, "shard")} are finished up to their heads.`),
  ];
}

const worker = (one) => [
  `${one.host}, process ${one.pid}`, one.assigned.join(", ") || "none", rate(one.rate), state(one.stall ?? "running"),
  one.oldest_call ? `${one.oldest_call.trigger}, for ${duration(one.oldest_call.age_s)}` : null,
  `${duration(one.seen_s)} ago`,
];

function orders(program, path, datastore) {
  const { program: name } = program;
  const reason = { name: "reason", text: "Why, for its status" };
  const halt = (title, action, says, fields, shown) => {
    const ask = ({ reason: why }, dry_run) =>
      call("POST", `${path}/${action}`, { body: { ...(why ? { reason: why } : {}), dry_run } });
    return button(title, () => order({
      title: `${title}: ${name}`, label: title, says, fields, datastore,
      preview: async (given) => shown(await ask(given, true)),
      run: (given) => ask(given, false),
    }));
  };
  return [
    program.state === "paused" || program.stopped.length || program.paused_shards.length
      ? halt("Resume", "resume", "What is paused or has stopped runs again.", [], (found) =>
        h("p", null, found.was_paused ? "The whole program would run again. " : "",
          `${many(found.stopped, "stopped shard")} and ${many(found.paused, "paused shard")} would run again. `,
          `${many(found.would.workers, "worker")} would obey.`))
      : null,
    program.state === "paused" ? null : halt("Pause", "pause",
      "Nothing is called until it is resumed. Workers obey within two seconds.", [reason],
      (found) => would(found.would)),
    button("Seek", () => order({
      title: `Seek: ${name}`, label: "Seek", datastore,
      says: "Its checkpoints go to another place of the log. Cells up to it are passed over. Later ones come again.",
      fields: [{ name: "to", text: "beginning, end, a time, or SHARD:GENERATION:ADDED_ID", required: true }],
      preview: async ({ to }) => seeks(await call("POST", `${path}/seek`, { body: { to, dry_run: true } })),
      run: async ({ to }) => {
        const found = await call("POST", `${path}/seek`, { body: { to } });
        return { told: `It is ordered. ${many(found.again, "cell")} come again, ${number(found.passed)} are passed.` };
      },
    })),
  ];
}

const seeks = (found) => [
  h("p", null, `${many(found.again, "cell")} would come again, and ${number(found.passed)} would be passed over.`),
  table("By shard", ["#shard", "from", "to", "#again", "#passed over"],
    found.shards.filter((one) => one.again || one.passed).slice(0, 50)
      .map((one) => [String(one.shard), one.from, one.to, number(one.again), number(one.passed)]),
    "No checkpoint would move."),
];

// Returns what is told how many cells are parked. A list that somebody reads changes only when they want that.
function parked(root, name, path, { datastore, isAdmin }, signal) {
  const texts = ["trigger", "column", "row_key", "since"];
  const fields = Object.fromEntries(texts.map((name) => [name, h("input", { id: `parked-${name}` })]));
  const causes = ["", ...CAUSES].map((one) => h("option", { value: one }, one || "any"));
  const cause = h("select", { id: "parked-cause" }, causes);
  const [list, sums] = [h("div", { "aria-live": "polite" }), h("p", { class: "row" })];
  const news = h("p", { role: "status" });
  let [count, listed, at, isOrdered] = [null, null, "", false];
  const given = () => Object.entries({ ...fields, cause }).map(([name, node]) => [name, node.value.trim()]);
  const filter = () => Object.fromEntries(given().filter(([, text]) => text));

  function changed() {
    const more = count - listed;
    show(news, more ? button(`${number(Math.abs(more))} ${more > 0 ? "more" : "fewer"}, refresh`, () => page()) : "");
  }

  async function page(cursor = "") {
    [listed, at] = [count, cursor];
    changed();
    try {
      const found = await call("GET", `${path}/parked`, { query: { ...filter(), limit: PAGE, cursor }, signal });
      list.replaceChildren(h("p", { class: "said" },
        `${many(found.count, "parked cell")} match${found.count === 1 ? "es" : ""}. `,
        `${number(found.parked.length)} shown, with what waits behind them.`,
        found.count ? " Correct the program, start it again, and retry them. Discard what shall never be called." : ""),
        ...found.parked.map((one) => cell(one, datastore, isAdmin && give)),
        found.parked.length ? "" : h("p", { class: "empty" }, "No cell is parked."),
        found.cursor ? button("Next page", () => page(found.cursor)) : "");
    } catch (error) {
      if (error.name !== "AbortError") list.replaceChildren(h("p", { class: "problem", role: "alert" }, error.message));
    }
  }

  const label = (name, node) => h("span", { class: "pair" }, h("label", { for: node.id }, name.replace("_", " ")),
    node);
  root.replaceChildren(h("h2", null, "Parked cells"), sums,
    h("form", { class: "row", onsubmit: (event) => { event.preventDefault(); page(); } },
      Object.entries(fields).map(([name, node]) => label(name, node)), label("cause", cause),
      h("button", null, "Filter"),
      isAdmin ? [all_of("Retry", "retry"), all_of("Discard", "discard")] : "",
      copier(curl(`${path}/parked`), "Copy as curl")),
    news, list);

  function give(title, action, what) {
    ordered(title, action, what, path, datastore, name, () => { isOrdered = true; page(at); });
  }

  function all_of(title, action) {
    return button(`${title} all that match…`, () => give(title, action, { filter: filter() }), action === "discard");
  }

  return (now) => {
    if (now === count) return;
    const isAsked = count === null || isOrdered;
    [count, isOrdered] = [now, false];
    if (isAsked) page(at);
    else changed();
    counts(sums, path, signal, (one) => { cause.value = one; page(); });
  };
}

async function counts(root, path, signal, choose) {
  const asked = CAUSES.filter((cause) => cause !== "behind").map(async (cause) =>
    [cause, (await call("GET", `${path}/parked`, { query: { cause, limit: 1 }, signal })).count]);
  try {
    root.replaceChildren(...(await Promise.all(asked)).filter(([, count]) => count).map(([cause, count]) =>
      button(`${cause}: ${number(count)}`, () => choose(cause))));
  } catch {
    root.replaceChildren(); // the list says what is wrong
  }
}

function cell(one, datastore, give) {
  const act = (title, action) => button(title, () => give(title, action, { ids: [one.id] }), action === "discard");
  return h("details", { class: "version" },
    h("summary", null, state(one.cause), ` ${one.id} `, h("span", { class: "clip" }, summary(one.error))),
    h("p", null, "Row ", link(place("cells", datastore, one.row_key), one.row_key),
      `, ${one.column_name} ${one.ref_key}, `,
      link(place("shards", datastore, one.shard, `${one.generation}:${one.added_id}`),
      `${one.shard}:${one.generation}:${one.added_id}`)),
    h("p", null, `${many(one.attempts, "attempt")}, parked at `, time(one.parked_at), also(" by version ", one.version),
      one.ordered ? `. A ${one.ordered} is ordered, due at ${one.due_at}` : "", also(". It waits behind ", one.behind)),
    one.error ? h("pre", { class: "body", tabindex: 0, "aria-label": "Error" }, one.error) : null,
    give && !one.behind ? h("p", { class: "row" }, act("Retry", "retry"), act("Discard", "discard")) : null,
    one.body ? body(one.body) : h("p", { class: "empty" }, one.unreadable ?? "Its body isn't kept."));
}

function ordered(title, action, what, path, datastore, name, done) {
  const isDiscard = action === "discard";
  const document = (given, more) => ({ ...what, ...(given.rate ? { rate: Number(given.rate) } : {}),
    ...(given.reason ? { reason: given.reason } : {}), ...more });
  order({
    title: `${title} parked cells of ${name}`, label: title, danger: isDiscard, datastore, done,
    says: isDiscard ? "They are never called. What waits behind them is called, in order."
      : "They are called again, each row in its order. One that fails is parked again.",
    fields: [{ name: "reason", text: isDiscard ? "Why (a discard needs a reason)" : "Why", required: isDiscard },
      { name: "rate", text: "Cells a second (empty: all at once)", kind: "number" }],
    preview: async (given) => {
      const found = await call("POST", `${path}/parked/${action}`, { body: document(given, { dry_run: true }) });
      const note = (text) => h("p", { class: "note" }, text);
      return [
        h("p", null, `${many(found.matched, "parked cell")} would be ${isDiscard ? "discarded" : "called again"}.`),
        ...found.left_out.map((one) => note(`${many(one.cells, "cell")} of ${one.name} left out: ${one.why}`)),
        found.waits_for ? note(`It would wait: ${found.waits_for}`) : "",
      ];
    },
    run: async (given) => {
      const found = await call("POST", `${path}/parked/${action}`, { body: document(given) });
      return found.job ? found : { told: "No cell matched." };
    },
  });
}
