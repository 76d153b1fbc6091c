// Orders: each asks before it acts, says what it would do, and follows its job to the end.

import { call, isFinal } from "./api.js";
import { also, h, many, number, show } from "./dom.js";

// `preview` asks the API without changing anything, and says what would happen. Until it did, the order can't be given.
export function order({ title, says, fields = [], label = title, danger = false, preview, run, datastore,
  done = () => {} }) {
  const inputs = fields.map((field) => input(field));
  const values = () => Object.fromEntries(inputs.map(([name, node]) => [name, node.type === "checkbox" ? node.checked
    : node.value.trim()]));
  const told = h("div", { role: "status" });
  let isBusy = false;
  const act = h("button", { class: danger ? "danger" : "main", disabled: true }, label);
  const look = h("button", { type: "button", onclick: asked }, "Show what it would do");
  const end = h("button", { type: "button", onclick: () => dialog.close() }, "Cancel");
  const form = h("form", { onsubmit: given, oninput: () => (act.disabled = true) },
    h("h2", { id: "order" }, title), h("p", null, says),
    inputs.map(([name, node, text]) => h("div", { class: "field" }, h("label", { for: `order-${name}` }, text), node)),
      told, h("div", { class: "row" }, look, act, end));
  const dialog = h("dialog", { "aria-labelledby": "order", onclose: () => dialog.remove() }, form);

  async function asked() {
    if (!form.reportValidity()) return;
    await tried(async () => {
      const seen = values();
      const shown = [await preview(seen)].flat();
      const isStale = JSON.stringify(seen) !== JSON.stringify(values());
      told.replaceChildren(...(isStale ? [h("p", { class: "note" }, "A field has changed. Ask again.")] : shown));
      act.disabled = isStale;
    });
  }

  async function given(event) {
    event.preventDefault();
    await tried(async () => {
      const answer = await run(values());
      inputs.forEach(([, node]) => (node.disabled = true));
      look.remove();
      act.remove();
      end.textContent = "Close";
      end.focus();
      if (answer?.job) follow(told, answer.ask ?? asksJob(datastore, answer.job), done);
      else told.replaceChildren(h("p", null, answer?.told ?? "It is done."));
      done();
    });
  }

  async function tried(work) {
    if (isBusy) return;
    isBusy = look.disabled = act.disabled = true; // what is asked again can't be given meanwhile
    try {
      await work();
    } catch (error) {
      told.replaceChildren(h("p", { class: "problem", role: "alert" }, error.status === 403
        ? `This token may not do that: ${error.message}` : error.message, error.hint ? `. ${error.hint}` : ""));
    } finally {
      isBusy = look.disabled = false;
    }
  }

  document.body.append(dialog);
  dialog.showModal();
  if (form.checkValidity()) asked();
}

// What a dry run answered.
export function would({ becomes, shards, workers, versions, limits, entries }) {
  const what = versions ? `Version ${versions.join(", ")}, in ${many(shards, "shard")},` : many(shards, "shard");
  const bounds = Object.entries(limits ?? {}).map(([name, value]) => `${name} ${value ?? "without bound"}`).join(", ");
  return h("p", null, `${what} would be ${becomes}${also(" with ", bounds)}. `,
    `${many(workers, "worker")} would obey.`,
    entries === undefined ? "" : ` About ${many(entries, "entry", "entries")} would be deleted.`);
}

function input({ name, text, kind = "text", value = "", required = false, options, placeholder }) {
  const more = { id: `order-${name}`, required };
  if (options) return [name, h("select", more, options.map((one) => h("option", { value: one, selected: one === value },
    one || "any"))), text];
  if (kind === "checkbox") return [name, h("input", { ...more, type: "checkbox", checked: value }), text];
  return [name, h("input", { ...more, type: kind, value, placeholder, step: kind === "number" ? "any" : null,
    autocomplete: "off" }), text];
}

export const faults = ({ missing, stale, ghost, repaired }) =>
  `${number(missing)} missing, ${number(stale)} stale, ${many(ghost, "ghost")}, ${number(repaired)} repaired`;

const PAUSE_MS = 1000;

// `ask` returns what is shown, and whether that is the end. It is asked until then, while the dialogue is open.
async function follow(root, ask, done) {
  while (root.isConnected) {
    try {
      const [shown, isEnd] = await ask();
      show(root, shown);
      if (isEnd) return done();
    } catch (error) {
      const why = isFinal(error) ? error.message : `Its state can't be read now: ${error.message}`;
      show(root, h("p", { class: "problem" }, why));
      if (isFinal(error)) return;
    }
    await new Promise((over) => setTimeout(over, PAUSE_MS));
  }
}

const asksJob = (datastore, job) => async () => {
  const found = await call("GET", `v1/${datastore}/jobs/${job}`);
  return [[
    h("p", null,
      `Job ${found.job}: ${found.state}. ${number(found.done)} of ${number(found.matched)} done`,
      found.failed ? `, ${number(found.failed)} failed again` : "",
      found.replaced ? `, ${number(found.replaced)} replaced by a later order` : ""),
    h("progress", { max: 1, value: found.matched ? found.done / found.matched : 1,
      "aria-label": "Progress of the job" }),
    found.missing === undefined ? "" : h("p", null, faults(found)),
    found.waits_for ? h("p", { class: "note" }, `It waits: ${found.waits_for}`) : "",
    h("p", { class: "empty" }, "It continues when this is closed. It is in the log of admin actions."),
  ], found.state === "done"];
};

export const button = (text, run, danger = false) => h("button", { type: "button", class: danger ? "danger" : "",
  onclick: run }, text);
