// Is it running, how far behind, how fast, what fails, how long yet? And the map of the installation.

import { call } from "./api.js";
import { also, duration, h, link, many, number, place, prose, rate, show, size, spark, state, table } from "./dom.js";
import { built } from "./indexes.js";
import { button, order } from "./orders.js";

export function mount(root, parts, { datastore, isAdminOfAll, watch }) {
  return watch({ view: "overview" }, (picture) => show(root, view(datastore, picture, isAdminOfAll)));
}

function view(datastore, picture, isAdminOfAll) {
  const tiles = [running, behind, fast, fails, yet].map((ask) => tile(ask(datastore, picture), picture.history.at));
  return [h("h1", { class: "unseen" }, `Overview of ${datastore}`),
    h("section", { class: "tiles", "aria-label": "Five answers" }, tiles),
    map(datastore, picture, isAdminOfAll)];
}

function tile({ question, answer, kind, causes, values, says }, times) {
  const [first, ...more] = causes;
  const rest = h("details", null,
    h("summary", null, `${number(more.length)} more`),
    h("ul", null, more.map((one) => h("li", null, cause(one)))));
  return h("article", { class: `tile ${kind}` },
    h("h2", null, question),
    h("p", { class: "answer" }, answer),
    spark(times, values, says),
    h("div", { class: "cause" }, cause(first)),
    more.length ? rest : null);
}

// A cause in words, with the way to its place. `remedy` says what to do where the page itself offers no order.
const cause = ({ text, place: to, remedy }) =>
  [to ? link(to, text) : text, remedy ? h("p", { class: "remedy" }, prose(remedy)) : null];

const LAST = "in the last 15 minutes";
const READ = "every index and program has read all cells";

// Who couldn't be asked, so that nobody takes silence for good news.
const unheard = (problem, ...clusters) => [
  ...(problem ? [{ text: problem }] : []),
  ...clusters.flatMap((one) => Object.entries(one ?? {})).map(([name, why]) => ({ text: `cluster ${name}: ${why}` })),
];
const range = (values) => `${number(Math.min(...values))} to ${number(Math.max(...values))}`;
const words = (text) => text.replaceAll("_", " ");
const programsOf = (part) => part.triggers ?? [];
const indexesOf = (part) => part.indexes ?? [];

function running(datastore, picture) {
  const { status, topology, history } = picture;
  const clusters = Object.entries(status.clusters ?? {});
  const nodes = clusters.flatMap(([name, cluster]) => cluster.nodes.map((node) => ({ ...node, cluster: name })));
  const states = Object.entries(topology.clusters ?? {}).filter(([, cluster]) => cluster.state !== "healthy");
  const found = [
    ...Object.values(picture).filter((part) => part.problem).map((part) => ({ isBad: true, text: part.problem })),
    ...nodes.flatMap(ill),
    ...(status.problem ? [] : tailing(datastore, status)),
    ...states.map(([name, cluster]) => ({ text: `cluster ${name}: ${words(cluster.state)}` })),
    ...programsOf(picture.triggers).filter((one) => one.state !== "running" || one.stall || one.reason)
      .map((one) => halted("program", one.program, one.state, one.reason, place("triggers", datastore, one.program))),
    ...indexesOf(picture.indexes).filter((one) => !["active", "building"].includes(one.state))
      .map((one) => halted("index", one.name, one.state, one.reason, place("indexes", datastore, one.name))),
  ];
  const bad = found.filter((one) => one.isBad);
  const causes = [...bad, ...found.filter((one) => !one.isBad)];
  return {
    question: "Is it running?",
    answer: bad.length ? "In part" : causes.length ? "Yes, with remarks" : "Yes",
    kind: bad.length ? "bad" : causes.length ? "warn" : "good",
    causes: causes.length ? causes : [{ text: `${many(nodes.length, "server")} answer, and nothing has stopped` }],
    values: history.servers,
    says: (known) => `${range(known)} servers answered ${LAST}`,
  };
}

function ill({ name, cluster, role, why, reachable, stall, setting_faults: faults }) {
  const remarks = faults.map((fault) => ({ text: `${name}: ${fault}` }));
  if (!reachable)
    return [{ isBad: role === "master",
      text: `${role} ${name} of cluster ${cluster} doesn't answer: ${why ?? "no reason is known"}`,
      remedy: `Start it again. In an embedded stack: \`schemaless up ${name}\`.` }, ...remarks];
  return stall ? [{ isBad: true, text: `${name}: ${words(stall)}${also(". ", why)}` }, ...remarks] : remarks;
}

// Why cells are stored and not published, and what to do about it.
function tailing(datastore, { tailing: word, tailing_reason: why, workers }) {
  if (word === "paused")
    return [{ isBad: true, text: "tailing is paused, so nothing is published",
      remedy: `\`schemaless tailer resume ${datastore}\` lets it continue.` }];
  if (!workers.some((row) => row.consumer === "tailer"))
    return [{ isBad: true, text: why, remedy: "Start one. In an embedded stack: `schemaless up tailer-0`." }];
  if (word === "running") return why ? [{ text: `cells are published, but ${why}` }] : [];
  const remedy = word === "no_kafka" ? "Start the broker again. In an embedded stack: `schemaless up kafka`."
    : `\`schemaless tailer status ${datastore}\` says more.`;
  return [{ isBad: true, text: `nothing is published (${words(word)}): ${why}`, remedy }];
}

const halted = (kind, name, word, why, to) => ({
  isBad: kind === "index" ? word === "failed" : word !== "paused",
  text: `${kind} ${name} ${word === "running" ? "waits" : `is ${word}`}${also(": ", why)}`,
  place: to,
});

function behind(datastore, { status, triggers, history }) {
  const seconds = Object.fromEntries(programsOf(triggers).map((one) => [one.program, one.lag_seconds]));
  const oldest = ({ kind, name }) => (kind === "trigger" && seconds[name] ? duration(seconds[name]) : "");
  const late = (status.consumers ?? []).filter((one) => one.lag > 0).sort((one, other) => other.lag - one.lag);
  const consumers = late.map((one) => ({
    text: `${one.kind} ${one.name} is ${many(one.lag, "cell")} behind${also(", the oldest for ", oldest(one))}`,
    place: place(one.kind === "index" ? "indexes" : "triggers", datastore, one.name.split(":")[0]),
  }));
  const minions = Object.values(status.clusters ?? {}).flatMap((cluster) => cluster.nodes)
    .filter((node) => node.lag_s > 2)
    .map((node) => ({ text: `minion ${node.name} is ${duration(node.lag_s)} behind its master` }));
  const unknown = unheard(status.problem, status.consumers_unknown, triggers.masters_away);
  const causes = [...consumers, ...minions, ...unknown];
  const most = Math.max(0, ...Object.values(seconds));
  let answer = "Not at all";
  if (late.length) answer = many(late[0].lag, "cell");
  else if (unknown.length) answer = "Unknown";
  else if (minions.length) answer = "Servers only";
  return {
    question: "How far behind?",
    answer,
    kind: most > 60 || unknown.length || minions.length ? "warn" : "good",
    causes: causes.length ? causes
      : [{ text: status.consumers.length ? READ : "there is no index and no trigger program" }],
    values: history.behind_s,
    says: (known) => `the oldest unfinished cell waited up to ${duration(Math.max(...known))} ${LAST}`,
  };
}

function fast(datastore, { status, triggers, history }) {
  const now = history.rate.at(-1);
  const stored = `${many(status.heads_sum ?? null, "cell")} in ${many(status.shards ?? null, "shard")}`;
  const causes = [{ text: stored, place: place("shards", datastore) }];
  for (const one of programsOf(triggers)) {
    const to = place("triggers", datastore, one.program);
    causes.push({ text: `program ${one.program} finishes ${rate(one.rate)}`, place: to });
  }
  return {
    question: "How fast?", answer: rate(now ?? null), kind: "", causes, values: history.rate,
    says: (known) => `${range(known)} cells a second were written ${LAST}`,
  };
}

function fails(datastore, { status, triggers, indexes, history }) {
  const causes = [];
  const add = (count, one, text, to) => {
    if (count > 0) causes.push({ count, text: `${many(count, one)} ${text}`, place: to });
  };
  for (const one of programsOf(triggers)) {
    const to = place("triggers", datastore, one.program);
    add(one.parked, "cell", `parked by ${one.program}`, to);
    add(one.failing_count, "cell", `failing in ${one.program}, called again later`, to);
    add(one.tripped_workers, "breaker", `open in ${one.program}`, to);
    add(one.stopped.length, "shard", `stopped in ${one.program}`, to);
  }
  add(status.refused, "buffered cell", "refused by their home");
  add(status.conflicts, "conflict", "between a buffered cell and the one at home");
  add(status.shards_ahead?.length, "shard", "with a clock that was ahead", place("shards", datastore));
  const unknown = unheard(status.problem ?? triggers.problem ?? indexes.problem, triggers.unknown);
  for (const one of indexesOf(indexes)) {
    const to = place("indexes", datastore, one.name);
    add(one.problems, "value", `not fitting index ${one.name}`, to);
    if (one.problems === null) unknown.push({ text: `nobody knows what doesn't fit index ${one.name}`, place: to });
  }
  const count = causes.reduce((sum, one) => sum + one.count, 0);
  return {
    question: "What fails?",
    answer: count ? many(count, "fault") : unknown.length ? "Unknown" : "Nothing",
    kind: count ? "bad" : unknown.length ? "warn" : "good",
    causes: count || unknown.length ? [...causes, ...unknown] : [{ text: "nothing is parked, refused or in conflict" }],
    values: history.failing,
    says: (known) => `${range(known)} cells failed or were parked ${LAST}`,
  };
}

function yet(datastore, { status, triggers, indexes, history }) {
  const versions = indexesOf(indexes).flatMap(({ name, versions: all }) => all.map((one) => ({ ...one, name })));
  const builds = versions.filter((one) => one.progress && one.state === "building").map((one) => ({
    seconds: one.progress.eta_s,
    text: `index ${one.name} is being built: ${built(one)}${also(". ", one.what_to_do)}`,
    place: place("indexes", datastore, one.name),
  }));
  const incoming = history.rate.at(-1) ?? null;
  const programs = programsOf(triggers).filter((one) => one.lag >= 100).map((one) => {
    const isSlow = incoming !== null && one.rate <= incoming;
    return {
      seconds: incoming === null || isSlow ? null : one.lag / (one.rate - incoming),
      text: `program ${one.program} has ${many(one.lag, "cell")} to go${isSlow ? " and doesn't catch up" : ""}`,
      place: place("triggers", datastore, one.program),
    };
  });
  const buffered = status.buffered > 0
    ? [{ text: `${many(status.buffered, "cell")} in buffers until their homes show them` }] : [];
  const unknown = unheard(status.problem ?? triggers.problem ?? indexes.problem, triggers.masters_away);
  const causes = [...builds, ...programs, ...buffered, ...unknown];
  let answer = "Nothing waits";
  if (buffered.length && causes.length === 1) answer = "A moment";
  else if (causes.some((one) => (one.seconds ?? null) === null)) answer = "Unknown";
  else if (causes.length) answer = `About ${duration(Math.max(...causes.map((one) => one.seconds)))}`;
  return {
    question: "How long yet?",
    answer,
    kind: "",
    causes: causes.length ? causes : [{ text: "no build runs, and buffers are empty" }],
    values: history.buffered,
    says: (known) => `${range(known)} cells waited in buffers ${LAST}`,
  };
}

function map(datastore, picture, isAdminOfAll) {
  const { status, topology } = picture;
  if (status.problem) return h("p", { class: "problem" }, status.problem);
  const operation = topology.operation;
  return h("section", { "aria-label": "Installation" },
    h("h2", null, "Installation"),
    operation ? h("p", { class: "note" },
      `${operation.actor} ordered ${operation.order} of cluster ${operation.cluster}${also(" to ", operation.node)}. `,
      "No controller has settled it yet.") : null,
    moves(topology.moves ?? []),
    h("div", { class: "cards" }, Object.entries(status.clusters).map(([name, cluster]) =>
      card(name, cluster, topology.clusters?.[name], picture.breakers,
        isAdminOfAll && (() => change(datastore, name, cluster))))),
    tailers(status), consumers(datastore, picture));
}

function moves(under) {
  if (!under.length) return null;
  const [copied, head] = ["copied", "head"].map((name) => under.reduce((sum, move) => sum + move[name], 0));
  const waiting = under.find((move) => move.told);
  const targets = [...new Set(under.map((move) => move.target))].join(" and ");
  return h("p", { class: "note" }, `${many(under.length, "shard")} on the way to ${targets}: ${number(copied)} of `
    + `${many(head, "cell")} copied, ${rate(under.reduce((sum, move) => sum + move.cells_s, 0))}`
    + `${also(". ", waiting?.told)}.`);
}

function change(datastore, name, cluster) {
  const minions = cluster.nodes.filter((node) => node.role === "minion").map((node) => node.name);
  const ask = ({ node }, dry_run) => call("POST", `v1/${datastore}/topology/orders`, {
    body: { order: "switch", cluster: name, ...(node ? { node } : {}), dry_run, wait: 5 },
  });
  const asks = (job) => async () => {
    const { order: last } = (await call("GET", `v1/${datastore}/topology`)).clusters[name];
    if (!last || (last.job === job && last.state === "open"))
      return [h("p", null, "It is ordered. No controller has settled it yet."), false];
    if (last.job !== job) return [h("p", { class: "problem" }, `A later order of ${last.actor} replaced it.`), true];
    return [h("p", { class: last.state !== "done" ? "problem" : null }, `${last.told}.`), true];
  };
  order({
    title: `Switch the master of cluster ${name}`, label: "Switch", datastore,
    says: "The controller lets a minion become the master once it has every cell. Puts are buffered meanwhile.",
    fields: [{ name: "node", text: "New master (any: the one that is furthest)", options: ["", ...minions] }],
    preview: async (given) => {
      const { told, voters } = await ask(given, true);
      return [h("p", null, `${told}.`),
        h("ul", null, voters.map((one) => h("li", null, `${one.name} is ${duration(one.lag_s)} behind`)))];
    },
    run: async (given) => {
      const { state: word, job, told } = await ask(given, false);
      return word === "open" ? { job, ask: asks(job) } : { told: `${told}.` };
    },
  });
}

function generations({ generations: known }) {
  if (!known) return "";
  const [lowest, highest] = known;
  return lowest === highest ? `generation ${lowest}` : `generations ${lowest} to ${highest}`;
}

function card(name, cluster, servers, breakers, changed) {
  const states = Object.fromEntries((servers?.nodes ?? []).map((node) => [node.name, node]));
  const said = (name, role) => states[name]?.state && states[name].state !== role
    ? `${role}, ${words(states[name].state)}${also(": ", states[name].why)}` : role;
  const word = servers?.controller;
  const rows = cluster.nodes.map((node) => [
    node.name, said(node.name, node.role), state(node.reachable ? "yes" : "no"),
    node.role === "master" ? "–" : duration(node.lag_s), state(breakers.includes(node.name) ? "open" : "closed"),
  ]);
  const waiting = Object.entries(cluster.backlogs);
  const isDown = cluster.nodes.some((node) => node.role === "master" && !node.reachable);
  return h("article", { class: "card" },
    h("h3", null, `Cluster ${name} `, servers ? state(isDown ? "master_down" : servers.state) : null),
    h("p", null,
      `epoch ${servers?.epoch ?? "unknown"}${also(", ", generations(cluster))}, ${many(cluster.heads_sum, "cell")}, `,
      many(cluster.conflicts, "conflict")),
    word && (word.state !== "healthy" || word.why)
      ? h("p", { class: "note" }, `The controller says ${words(word.state)}${also(": ", word.why)}`) : null,
    changed ? button("Switch the master", changed) : null,
    table(`Servers of ${name}`, ["server", "role", "answers", "#behind", "breaker"], rows, "no server"),
    waiting.length
      ? h("ul", null,
        waiting.map(([home, one]) => h("li", null,
        `buffers ${many(one.rows, "cell")} (${size(one.bytes)}) for ${home}, the oldest for ${duration(one.oldest_s)}`,
        one.refused ? `. Its home refuses ${number(one.refused.cells)}: ${one.refused.reason}` : "")))
      : h("p", { class: "empty" }, "Its buffers are empty."));
}

const process = (row) => `${row.host}, process ${row.pid}`;

function tailers(status) {
  const rows = status.workers.filter((row) => row.consumer === "tailer").map((row) => [
    process(row), row.assigned.join(", ") || "none", rate(row.rate), state(row.stall ?? "running"),
    `${duration(row.seen_s)} ago`,
  ]);
  const name = `Tailers, for ${many(status.partitions, "partition")}`;
  const none = "No tailer reports. Cells are stored, and not published.";
  return [h("h3", null, "Tailers ", rows.length ? state(status.tailing) : null),
    table(name, ["process", "partitions", "#rate", "state", "#seen"], rows, none)];
}

function consumers(datastore, { status, triggers }) {
  const rates = Object.fromEntries(programsOf(triggers).map((one) => [`trigger:${one.program}`, one]));
  const rows = status.consumers.map((one) => {
    const runner = one.kind === "index" ? "indexer" : one.consumer;
    const workers = status.workers.filter((row) => row.consumer === runner).length;
    const to = place(one.kind === "index" ? "indexes" : "triggers", datastore, one.name.split(":")[0]);
    const known = rates[one.consumer];
    return [
      link(to, one.name), one.kind, state(known?.state ?? one.stall ?? one.state),
      many(one.lag, "cell"), known ? rate(known.rate) : null, number(workers), known?.reason ?? one.reason ?? "",
    ];
  });
  const heads = ["name", "kind", "state", "#behind", "#rate", "#processes", "reason"];
  const unsaid = ([cluster, why]) =>
    h("p", { class: "problem" }, `Cluster ${cluster} can't say how far they are: ${why}`);
  return [h("h3", null, "Consumers"),
    table("Indexes and trigger programs", heads, rows, "There is no index and no trigger program yet."),
    Object.entries(status.consumers_unknown).map(unsaid)];
}
