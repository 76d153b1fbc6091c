// The shell: who is here, which datastore, which view, and whether the API answers.

import { Problem, call, follow, isFinal, token } from "./api.js";
import { h, link, place, prose, show } from "./dom.js";
import * as cells from "./cells.js";
import * as indexes from "./indexes.js";
import * as overview from "./overview.js";
import * as shards from "./shards.js";
import * as triggers from "./triggers.js";

const VIEWS = { overview, shards, cells, indexes, triggers };
const LOOK_PERIOD_MS = 2000;
const [top, main, told] = ["top", "main", "told"].map((id) => document.getElementById(id));
let [session, leave, connection] = [null, () => {}, ""];

function say(text, kind = "") {
  told.className = kind;
  told.textContent = text;
}

function shell(view, datastore) {
  const chosen = h("select",
    { id: "datastore", onchange: (event) => (location.hash = place(view, event.target.value)) },
    Object.keys(session.datastores).map((name) => h("option", { value: name, selected: name === datastore }, name)));
  const views = Object.keys(VIEWS).map((name) =>
    h("li", null, h("a", { href: place(name, datastore), "aria-current": name === view ? "page" : null }, name)));
  top.replaceChildren(
    h("strong", { class: "brand" }, "Schemaless"),
    h("label", { for: "datastore" }, "datastore"), chosen,
    h("nav", { "aria-label": "Views" }, h("ul", null, views)),
    h("span", { id: "connection", class: connection }, connection),
    h("span", { class: "who" }, `${session.token}: ${session.datastores[datastore] ?? "no access"}`),
    token.get() ? h("button", { type: "button", class: "small", onclick: () => signOut("") }, "Sign out") : "");
}

function signOut(why) {
  token.set(null);
  for (const dialog of document.querySelectorAll("dialog")) dialog.close();
  leave();
  [session, leave] = [null, () => {}];
  top.replaceChildren(h("strong", { class: "brand" }, "Schemaless"));
  const field = h("input", { id: "token", type: "password", autocomplete: "off", required: true, spellcheck: "false" });
  main.replaceChildren(h("form", { class: "signin", onsubmit: async (event) => {
    event.preventDefault();
    token.set(field.value.trim());
    await begin();
  } },
    h("h1", null, "A token is needed"),
    why ? h("p", { class: "problem", role: "alert" }, why) : null,
    h("p", null, "Make one with ", h("code", null, "schemaless token create NAME --datastore D --scope read"),
      ". It stays in this tab, and is gone when the tab is closed."),
    h("label", { for: "token" }, "Token"), field,
    h("button", { class: "main" }, "Sign in")));
  field.focus();
}

async function begin() {
  const had = token.get();
  try {
    session = await call("GET", "ui/session");
  } catch (error) {
    if (error.status === 401) return signOut(had ? `That token is not taken: ${error.message}.` : "");
    main.replaceChildren(h("p", { class: "problem", role: "alert" },
      `${error.message}. The page tries again in a moment.`));
    return setTimeout(begin, 2000);
  }
  open();
}

// Opens what the address names. A view gets its parts and this context, and returns what ends it.
function open() {
  if (!session) return;
  leave();
  [leave, connection] = [() => {}, ""];
  say("");
  const parts = location.hash.slice(2).split("/").filter(Boolean).map(decoded);
  const [view = "overview", datastore = Object.keys(session.datastores)[0], ...rest] = parts;
  if (!datastore) {
    main.replaceChildren(h("h1", null, "There is no datastore"),
      h("p", null, prose("This token reaches none. `schemaless datastore create` makes one.")));
    return lookFor(() => Object.keys(session.datastores).length > 0);
  }
  shell(view in VIEWS ? view : "overview", datastore);
  main.replaceChildren();
  document.title = [view, datastore, ...rest].join(" · ");
  if (!(view in VIEWS))
    return main.replaceChildren(h("h1", null, "There is no such view"),
      link(place("overview", datastore), "Go to the overview"));
  const root = h("div", { class: view });
  main.append(root);
  // A datastore may be younger than the page. No other name becomes a part of a path.
  const isThere = () => Object.hasOwn(session.datastores, datastore);
  if (!isThere()) {
    failed(root, new Problem({ detail: `there is no datastore '${datastore}' that this token reaches` }, 404));
    return lookFor(isThere);
  }
  const context = {
    datastore,
    isAdmin: session.datastores[datastore] === "admin",
    isAdminOfAll: session.everywhere,
    watch: (query, seen) => watch(root, datastore, query, seen),
  };
  try {
    leave = VIEWS[view].mount(root, rest, context) ?? leave;
  } catch (error) {
    failed(root, error);
  }
}

// Asks who is here until what was missing is there. Who leaves the view ends that.
function lookFor(isThere) {
  let timer = 0;
  const look = async () => {
    try {
      const now = await call("GET", "ui/session");
      if (timer === null) return;
      session = now;
      if (isThere()) return open();
    } catch {
      // asked again
    }
    if (timer !== null) timer = setTimeout(look, LOOK_PERIOD_MS);
  };
  leave = () => {
    clearTimeout(timer);
    timer = null;
  };
  look();
}

const decoded = (part) => {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
};

function failed(root, error) {
  if (error.name === "AbortError") return;
  connected("refused");
  const title = error instanceof Problem ? "That can't be shown" : "The page has a fault";
  const hint = error.hint ? h("p", null, error.hint) : null;
  root.replaceChildren(
    h("div", { class: "problem", role: "alert" }, h("h1", null, title), h("p", null, error.message), hint));
}

function watch(root, datastore, query, seen) {
  root.replaceChildren(h("p", { class: "empty" }, "Asking the servers…"));
  let isFirst = true;
  const close = follow(`ui/events/${encodeURIComponent(datastore)}`, query, {
    event(kind, data) {
      if (kind === "problem") {
        const problem = new Problem(data, data.status);
        if (!isFinal(problem)) return say(`The picture can't be had now: ${data.detail}`, "bad");
        close();
        return failed(root, problem);
      }
      if (told.className === "bad") say("");
      if (isFirst) root.replaceChildren();
      isFirst = false;
      seen(data);
    },
    told(word, error) {
      if (word === "refused") failed(root, error);
      else connected(word, error);
    },
  });
  return close;
}

function connected(word, error) {
  const why = error?.status ? error.message : "The API doesn't answer";
  if (word === "away") say(`${why}. What you see is from before. The page tries again.`, "bad");
  else if (connection === "away") say("The API answers again.");
  connection = word;
  const shown = document.getElementById("connection");
  if (shown) show(Object.assign(shown, { className: word }), word === "connected" ? "live" : "not live");
}

window.addEventListener("hashchange", () => {
  open();
  main.focus();
});
window.addEventListener("signedout", (event) => session && signOut(`${event.detail.message}.`));
begin();
