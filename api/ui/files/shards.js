// The heat map of all shards, and one shard with its log.

import { call, curl, follow, pretty } from "./api.js";
import { also, copier, h, link, many, number, place, rate, show, state, table, time } from "./dom.js";

const LINES_MAX = 200;
const NAMES = { rate: "cells a second", lags: "cells behind", faults: "faults" };

export function mount(root, parts, context) {
  return parts.length ? one(root, parts[0], parts[1] ?? null, context) : all(root, context);
}

// One canvas for all shards: 4096 elements would be laid out anew with every picture.
function all(root, { datastore, watch }) {
  let [before, picture, shows, chosen, rates] = [null, null, "rate", 0, []];
  const canvas = h("canvas", {
    tabindex: 0, role: "img", onkeydown: keyed,
    onclick: (event) => open(at(event)), onmousemove: (event) => point(at(event)),
  });
  const said = h("p", { class: "said", "aria-live": "polite" });
  const [sums, legend, faults] = [h("p"), h("p", { class: "said" }), h("div")];
  const choose = (name) => () => { shows = name; draw(); };
  const radio = (name) =>
    h("input", { type: "radio", name: "shows", value: name, checked: name === shows, onchange: choose(name) });
  const choice = h("fieldset", null, h("legend", null, "Show"),
    Object.keys(NAMES).map((name) => h("label", null, radio(name), NAMES[name])));
  const side = () => [32, 20, 14][[256, 1024].filter((most) => picture.heads.length > most).length];
  const columns = () => Math.max(8, Math.min(picture.heads.length, Math.floor((root.clientWidth || 800) / side())));
  const at = (event) => Math.floor(event.offsetY / side()) * columns() + Math.floor(event.offsetX / side());
  const open = (shard) => { if (shard < picture.heads.length) location.hash = place("shards", datastore, shard); };

  function point(shard) {
    if (shard < 0 || shard >= picture.heads.length) return;
    chosen = shard;
    const fault = picture.faults[shard];
    const home = picture.placement[shard];
    said.textContent = `Shard ${shard} on cluster ${home}: head ${number(picture.heads[shard])}, `
      + `${rate(rates[shard] ?? null)}, ${many(picture.lags[shard], "cell")} behind${also(". ", fault)}`;
    draw();
  }

  function keyed(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns(), ArrowUp: -columns() }[event.key];
    if (event.key === "Enter") open(chosen);
    if (!step) return;
    event.preventDefault();
    point(Math.max(0, Math.min(picture.heads.length - 1, chosen + step)));
  }

  function draw() {
    const [CELL, wide, count, ratio] = [side(), columns(), picture.heads.length, window.devicePixelRatio || 1];
    const [width, height] = [wide * CELL, Math.ceil(count / wide) * CELL];
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const style = getComputedStyle(canvas);
    const colour = (name) => style.getPropertyValue(name).trim();
    const [none, some, bad, ink, paper] = ["--none", "--heat", "--bad", "--ink", "--paper"].map(colour);
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const ill = picture.heads.map((_, shard) => (picture.faults[shard] ? 1 : 0));
    const values = { rate: rates, lags: picture.lags, faults: ill }[shows];
    const most = values.reduce((high, value) => Math.max(high, value ?? 0), 0) || 1;
    legend.textContent = shows === "faults" ? "A red shard has a fault, or its head is unknown."
      : `The strongest colour is ${number(most)} ${NAMES[shows]}. The head of a red shard is unknown.`;
    for (let shard = 0; shard < count; shard += 1) {
      const [x, y] = [(shard % wide) * CELL, Math.floor(shard / wide) * CELL];
      pen.globalAlpha = 1;
      pen.fillStyle = none;
      pen.fillRect(x, y, CELL - 1, CELL - 1);
      const isUnknown = picture.heads[shard] === null;
      pen.globalAlpha = isUnknown ? 0.35 : Math.sqrt((values[shard] ?? 0) / most);
      pen.fillStyle = isUnknown || shows === "faults" ? bad : some;
      if (pen.globalAlpha) pen.fillRect(x, y, CELL - 1, CELL - 1);
      pen.fillStyle = pen.globalAlpha > 0.6 ? paper : ink;
      pen.globalAlpha = 1;
      if (CELL > 30) pen.fillText(shard, x + 4, y + 13);
    }
    pen.globalAlpha = 1;
    pen.strokeStyle = ink;
    pen.strokeRect((chosen % wide) * CELL - 0.5, Math.floor(chosen / wide) * CELL - 0.5, CELL, CELL);
  }

  const resized = () => picture && draw();
  window.addEventListener("resize", resized);
  const close = watch({ view: "shards" }, (fresh) => {
    if (!picture) root.append(h("h1", null, `Shards of ${datastore}`), sums, choice, canvas, legend, said, faults);
    [before, picture] = [picture, fresh];
    const grown = (head, old) => Math.max(0, head - old) / (picture.at - before.at);
    const areKnown = (shard) => picture.heads[shard] !== null && typeof before?.heads[shard] === "number";
    rates = picture.heads.map((head, shard) => (areKnown(shard) ? grown(head, before.heads[shard]) : null));
    const sum = rates.reduce((all, value) => all + (value ?? 0), 0);
    const behind = picture.lags.filter((lag) => lag > 0).length;
    const ill = Object.entries(picture.faults);
    const text = `${many(picture.heads.length, "shard")}: ${before ? rate(sum) : "rates come with the next look"}, `
      + `${number(behind)} with something unread, ${number(ill.length)} with a fault`;
    show(sums, text);
    canvas.setAttribute("aria-label", `Heat map. ${text}. Arrow keys choose a shard, Enter opens it.`);
    show(faults,
      Object.entries(picture.unknown).map(([cluster, why]) =>
        h("p", { class: "problem" }, `The heads of cluster ${cluster} are unknown: ${why}`)),
      h("h2", null, "Faults"),
      table("Shards with a fault", ["#shard", "fault"],
        ill.slice(0, 100).map(([shard, why]) => [link(place("shards", datastore, shard), shard), why]),
        "No shard has a fault."));
    draw();
  });
  return () => {
    window.removeEventListener("resize", resized);
    close();
  };
}

function one(root, shard, from, { datastore, watch }) {
  let [picture, unfollow, cells, isDrawn] = [null, () => {}, [], true];
  const [facts, tail, heading] = [h("div"), h("div"), h("h1", null, `Shard ${shard} of ${datastore}`)];
  const path = `v1/${datastore}/shards/${encodeURIComponent(shard)}/cells`;
  const word = h("span", { class: "said", role: "status" });
  const start = h("input", { id: "after", value: from ?? "", placeholder: "GENERATION:ADDED_ID" });
  const live = h("input", { type: "checkbox", id: "live", onchange: () => (live.checked ? followOn() : unfollow()) });

  const line = (cell) => [
    `${cell.generation}:${cell.added_id}`, link(place("cells", datastore, cell.row_key), cell.row_key),
    cell.column_name, String(cell.ref_key), time(cell.created_at),
    h("code", { class: "clip" }, cell.body),
  ];
  const heads = ["location", "row", "column", "#ref key", "written", "body"];
  const short = (cell) => ({ ...cell, body: pretty(cell.body ?? cell.erased).replace(/\s+/g, " ").slice(0, 160) });

  // Many cells may come between two frames.
  function lines() {
    if (isDrawn) requestAnimationFrame(() => {
      isDrawn = true;
      show(tail, table("Cells of the log", heads, cells.map(line), "The log has no cell after that location."));
    });
    isDrawn = false;
  }

  async function page(after) {
    unfollow();
    live.checked = false;
    try {
      const found = await call("GET", path, { query: { after, limit: 50 } });
      cells = found.cells.map(short);
      word.textContent = `${many(found.pending, "cell")} after these, up to the head ${number(found.head)}`;
      start.value = `${found.next.generation}:${found.next.added_id}`;
    } catch (error) {
      cells = [];
      word.textContent = error.message + also(". It can be read on after ", error.document?.resume_at);
    }
    lines();
  }

  function followOn() {
    unfollow();
    cells = [];
    lines();
    unfollow = follow(path, { follow: "true", after: "end" }, {
      event(kind, data) {
        if (kind === "problem") word.textContent = data.detail;
        if (kind === "generation")
          word.textContent = `Generation ${data.generation} begins at ${number(data.starts_at)}`;
        if (kind !== "cell") return;
        cells = [short(data), ...cells].slice(0, LINES_MAX);
        lines();
      },
      told: (state, error) => (word.textContent = { connected: "Following the log: new cells come on top.",
        away: "The log can't be followed now. The page tries again.", refused: error?.message }[state]),
    });
  }

  const controls = h("form", { class: "row", onsubmit: (event) => { event.preventDefault(); page(start.value || 0); } },
    h("label", { for: "after" }, "after"), start, h("button", null, "Read 50 cells"),
    h("label", { for: "live" }, live, "live tail"), copier(curl(path, { after: from ?? 0 }), "Copy as curl"), word);
  const close = watch({ view: "shard", of: shard }, (fresh) => {
    if (!picture) {
      root.append(heading, facts, h("h2", null, "Log"), controls, tail);
      const head = fresh.head;
      page(from ? before(from) : `${fresh.generation}:${Math.max(0, head - 20)}`);
    }
    const passed = picture ? fresh.at - picture.at : 0;
    const speed = picture && passed ? Math.max(0, fresh.head - picture.head) / passed : null;
    picture = fresh;
    show(facts,
      h("p", null,
        `Cluster ${picture.cluster}, generation ${picture.generation}, head ${number(picture.head)}, `,
        speed === null ? "" : `${rate(speed)}, `, "last cell at ", time(picture.last_created_at)),
      table("Generations", ["generation", "starts at"], picture.generations.map((one) => [number(one.generation),
        number(one.starts_at)]), "It has had one generation only."),
      table("Followers", ["consumer", "at", "#distance", "state", "reason"], picture.consumers.map((one) => [
        link(place(...consumerPlace(datastore, one.consumer)), one.consumer), one.location, many(one.lag, "cell"),
          state(one.state), one.reason ?? ""]),
      "No index and no program reads this shard."));
  });
  return () => {
    unfollow();
    close();
  };
}

const before = (location) => {
  const [generation, added] = location.split(":");
  return added === undefined ? Math.max(0, generation - 1) : `${generation}:${Math.max(0, added - 1)}`;
};

const consumerPlace = (datastore, consumer) => {
  const [kind, name] = consumer.split(":");
  return [kind === "index" ? "indexes" : "triggers", datastore, name];
};
