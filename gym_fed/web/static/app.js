// Shared by all screens: elements, the API, live events, the router, tables, states and formats.
// Untrusted text is inserted only with textContent.

export class ApiError extends Error {
  constructor(status, {code, message, hint, problems}) {
    super(message);
    Object.assign(this, {status, code, hint, problems});
  }
}

export const session = {face: "", title: "", visitor: null, role: "", csrf: ""};
export const mayChange = () => session.csrf !== "";

// ---- addresses ----

// The path prefix at a reverse proxy, such as "/gym", taken from this file's own URL.
const PREFIX = new URL(import.meta.url).pathname.replace(/\/static\/app\.js$/, "");
const within = (path) => PREFIX + path;
const without = (path) => (path.startsWith(`${PREFIX}/`) ? path.slice(PREFIX.length) : path === PREFIX ? "/" : path);
export const siteUrl = (path) => location.origin + within(path);

// ---- elements ----

// el("a", {href: "/rounds", class: "quiet", onclick: f}, "text", other) — properties of DOM events begin with "on".
// Paths of this site are written without the prefix.
export function el(tag, properties = {}, ...children) {
  const svg = SVG.has(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "value") node.value = value;
    else if (name === "href" && /^\/(?!\/)/.test(value)) node.setAttribute(name, within(value));
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}
const SVG = new Set(["svg", "circle", "path", "line", "rect", "g", "text", "polyline", "title"]);

export function replace(node, ...children) {
  node.replaceChildren(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

// ---- the API ----

export async function api(path, options = {}) {
  let response;
  try {
    response = await fetch(within(`/api/v1/${path}`), {credentials: "same-origin", ...options});
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, {code: "unavailable", message: "the server does not answer", hint: "is it still running?"});
  }
  const text = await response.text();
  let body = {};
  try { body = text ? JSON.parse(text) : {}; } catch { /* a proxy's page, below */ }
  if (!response.ok) {
    throw new ApiError(response.status, body.error || {code: "internal", message: `the server answered ${response.status}`, hint: ""});
  }
  return body;
}

export function post(path, body = {}, method = "POST") {
  return api(path, {method, body: JSON.stringify(body), headers: {"Content-Type": "application/json", "X-CSRF-Token": session.csrf}});
}

// Stream an answer; take(data) is called for every event of the stream.
export async function streamed(path, body, signal, take) {
  const response = await fetch(within(`/api/v1/${path}`), {method: "POST", credentials: "same-origin", signal, headers: {"Content-Type": "application/json", "X-CSRF-Token": session.csrf}, body: JSON.stringify(body)});
  if (!response.ok) throw new ApiError(response.status, (await response.json()).error);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {done, value} = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const text = event.replace(/^data: /, "");
      if (text !== "[DONE]") take(JSON.parse(text));
    }
  }
}

// ---- live events ----

// One stream of events; ids seen before are skipped. A hidden page closes it after some seconds, since a browser
// opens at most six connections to a server for all tabs. Screens that need missed events listen for "resumed".
const HIDDEN_SECONDS = 5;
let stream = null;
let lastId = -1;
let numOpened = 0;
let hiding = null;
const listeners = new Map();

export function on(kind, callback) {
  if (!listeners.has(kind)) {
    listeners.set(kind, new Set());
    if (stream) attach(kind);
  }
  listeners.get(kind).add(callback);
  leaving.add(() => listeners.get(kind).delete(callback));
}

function attach(kind) {
  stream.addEventListener(kind, (event) => {
    const id = event.lastEventId === "" ? -1 : Number(event.lastEventId);
    if (BY_ID.has(kind) && id >= 0) {
      if (id <= lastId) return;
      lastId = id;
    }
    const data = JSON.parse(event.data);
    for (const callback of [...(listeners.get(kind) || [])]) callback(data, id);
  });
}
const BY_ID = new Set(["verdict", "version", "ledger"]);

function connect() {
  if (stream) stream.close();
  if (document.hidden && mayRest()) { stream = null; numOpened = Math.max(1, numOpened); return; }
  const mine = stream = new EventSource(within(lastId < 0 ? "/events" : `/events?after=${lastId}`));
  const shown = document.getElementById("connection");
  const say = (state, text) => { if (shown) { shown.dataset.state = state; shown.textContent = text; } };
  stream.onopen = () => { say("live", "live"); if (numOpened++) for (const callback of [...(listeners.get("resumed") || [])]) Promise.resolve(callback()).catch(() => {}); };
  stream.onerror = () => {
    say("lost", "reconnecting");
    if (mine.readyState === EventSource.CLOSED) setTimeout(() => again(), 3000);
  };
  stream.addEventListener("position", (event) => { if (lastId < 0) lastId = Number(event.lastEventId); });
  stream.addEventListener("reload", () => { lastId = -1; stream.close(); say("lost", "reconnecting"); setTimeout(() => again(show), 200); });
  for (const kind of listeners.keys()) attach(kind);
}

// The contributor's page keeps its stream, since a process started by a link exits when its page is closed.
const mayRest = () => session.face !== "client";

function onVisibility() {
  clearTimeout(hiding);
  if (!session.visitor) return;
  if (!document.hidden) { if (!stream) again(); return; }
  if (mayRest()) hiding = setTimeout(() => { stream?.close(); stream = null; }, 1000 * HIDDEN_SECONDS);
}

// A stream was refused: the server has restarted and forgotten the login, or is still starting.
async function again(then = () => {}) {
  try {
    Object.assign(session, {visitor: null, role: "", csrf: ""}, await api("session"));
    if (session.visitor === null) { stream?.close(); loginScreen("The server was restarted, and each start has a new token. Use the URL that it printed last, or log in here."); return; }
  } catch { setTimeout(() => again(then), 3000); return; }
  connect();
  then();
}

// ---- screens ----

// A screen is a module with `title` and `show(root, parameters, query)`; it registers cleanup with `leave(callback)`.
let routes = [];
const leaving = new Set();
export const leave = (callback) => leaving.add(callback);
let shownAt = 0;

export async function start({screens, links}) {
  routes = screens;
  const given = document.querySelector("meta[name=session]");
  Object.assign(session, given ? JSON.parse(given.content) : await api("session"));
  frame(links);
  if (!session.visitor) { loginScreen(); return; }
  connect();
  addEventListener("popstate", show);
  document.addEventListener("visibilitychange", onVisibility);
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[href^='/']");
    if (!link || link.target || link.hasAttribute("download") || event.metaKey || event.ctrlKey || event.shiftKey) return;
    event.preventDefault();
    navigate(without(link.getAttribute("href")));
  });
  await show();
}

export function navigate(url, {again = true} = {}) {
  history.pushState({}, "", within(url));
  if (again) show();
}

// Keep the state of a screen in the URL (?xmin=...), so that a link shows the same view.
export function remember(query) {
  const url = new URL(location.href);
  for (const [name, value] of Object.entries(query)) {
    if (value === "" || value === null || value === undefined) url.searchParams.delete(name);
    else url.searchParams.set(name, value);
  }
  history.replaceState({}, "", url);
}

async function show() {
  const main = document.getElementById("main");
  for (const callback of leaving) callback();
  leaving.clear();
  const turn = ++shownAt;
  const path = decodeURIComponent(without(location.pathname));
  const first = document.querySelector("header.top nav a"); // the link of the first page
  for (const link of document.querySelectorAll("header.top nav a")) {
    const target = without(link.getAttribute("href"));
    const here = target === "/" ? path === "/" : path === target || (path === "/" && link === first) || path.startsWith(`${target}/`);
    if (here) { link.setAttribute("aria-current", "page"); link.parentElement.scrollLeft = link.offsetLeft - (link.parentElement.clientWidth - link.offsetWidth) / 2; } else link.removeAttribute("aria-current");
  }
  for (const [pattern, load] of routes) {
    const parameters = match(pattern, path);
    if (!parameters) continue;
    replace(main, loading());
    try {
      const screen = await load();
      if (turn !== shownAt) return;
      document.title = `${screen.title} · ${session.title}`;
      const root = el("div", {class: "screen"});
      const done = screen.show(root, parameters, new URLSearchParams(location.search));
      replace(main, root);
      await done;
    } catch (error) {
      if (turn === shownAt) replace(main, failed(error, show));
    }
    if (turn === shownAt) main.focus({preventScroll: true});
    return;
  }
  replace(main, empty("There is no such page.", el("a", {href: "/"}, "Go to the first page")));
}

function match(pattern, path) {
  const wanted = pattern.split("/"), given = path.split("/");
  const parameters = {};
  for (let at = 0; at < wanted.length; at++) {
    if (wanted[at].startsWith("*")) { parameters[wanted[at].slice(1)] = given.slice(at).join("/"); return parameters; }
    if (wanted[at].startsWith(":") && given[at]) parameters[wanted[at].slice(1)] = given[at];
    else if (wanted[at] !== given[at]) return null;
  }
  return wanted.length === given.length ? parameters : null;
}

function frame(links) {
  const who = session.visitor === null ? "" : session.role === "operator" ? "operator" : "viewer";
  replace(document.body,
    el("a", {class: "skip", href: "#main", onclick: (event) => { event.preventDefault(); document.getElementById("main").focus(); }}, "Skip to the content"),
    el("header", {class: "top"},
      el("a", {class: "brand", href: "/"}, mark(), el("span", {}, session.title)),
      el("nav", {"aria-label": "Screens"}, links.map(([href, text]) => el("a", {href}, text))),
      el("div", {class: "status"},
        el("span", {id: "connection", class: "connection", role: "status", "data-state": "idle"}, ""),
        who && el("span", {class: "role"}, who))),
    el("main", {id: "main", tabindex: "-1"}));
}

function mark() {
  return el("svg", {viewBox: "0 0 16 16", width: 16, height: 16, "aria-hidden": "true", class: "mark"},
    el("circle", {cx: 8, cy: 8, r: 6.5, fill: "none", stroke: "currentColor", "stroke-width": 1.5}),
    el("circle", {cx: 8, cy: 8, r: 2.5, fill: "currentColor"}));
}

function loginScreen(why = "") {
  for (const callback of leaving) callback();
  leaving.clear();
  shownAt++;
  const connection = document.getElementById("connection");
  if (connection) { connection.dataset.state = "idle"; connection.textContent = ""; }
  const field = el("input", {id: "key", type: "password", autocomplete: "current-password", required: true});
  const said = el("p", {role: "alert", class: "problem"});
  const form = el("form", {class: "login", onsubmit: async (event) => {
    event.preventDefault();
    try { await post("login", {key: field.value}); location.reload(); } catch (error) { replace(said, message(error)); }
  }}, el("h1", {}, "Log in"), why && el("p", {class: "quiet"}, why),
  el("label", {for: "key"}, "Key, or the token in the printed URL"), field,
  el("button", {class: "primary"}, "Log in"), said);
  replace(document.getElementById("main"), form);
  field.focus();
}

// ---- states ----

export const loading = (text = "Loading", role = "status") => el("p", {class: "state", role}, el("span", {class: "pulse", "aria-hidden": "true"}), el("span", {}, text, waited()));
// How long something has been awaited, from the third second on; a screen reader is spared the count.
export function waited(before = 0) {
  const node = el("span", {class: "number", "aria-hidden": "true"}), began = performance.now() - 1000 * before;
  const draw = () => { const seconds = Math.floor((performance.now() - began) / 1000); if (seconds > 2) node.textContent = `, ${duration(seconds)}`; };
  const timer = setInterval(() => { if (node.isConnected) draw(); else clearInterval(timer); }, 1000);
  draw();
  return node;
}
export const empty = (text, ...more) => el("div", {class: "state empty"}, el("p", {}, text), more);

const sentence = (text) => (/[.?!]$/.test(text) ? text : `${text}.`);
export const message = (error) => (error.hint ? `${sentence(error.message)} ${sentence(capital(error.hint))}` : sentence(error.message));

export function failed(error, again) {
  if (!(error instanceof ApiError)) console.error(error);
  return el("div", {class: "state failed", role: "alert"},
    el("h1", {}, error.status === 403 ? "Not allowed" : error.status === 404 ? "Not found" : "This failed"),
    el("p", {}, capital(message(error))),
    again && el("button", {onclick: () => again()}, "Try again"));
}

// A first word in capitals, unless it is a path, a name or a command.
const capital = (text) => (/^(?!gym\b)\p{Ll}[\p{Ll}'’-]*[,;:.]?(\s|$)/u.test(text) ? text.charAt(0).toUpperCase() + text.slice(1) : text);

let saying = null;
export function say(text) {
  document.querySelector(".toast")?.remove();
  clearTimeout(saying);
  document.body.append(el("div", {class: "toast", role: "status"}, text));
  saying = setTimeout(() => document.querySelector(".toast")?.remove(), 6000);
}

// Run the action of a button, which is disabled meanwhile; an error is shown next to it.
export function action(text, run, {primary = false, confirm = ""} = {}) {
  const said = el("span", {class: "problem", role: "alert"});
  const button = el("button", {type: "button", class: primary ? "primary" : "", onclick: async () => {
    if (confirm && !window.confirm(confirm)) return;
    button.disabled = true;
    replace(said);
    try { await run(); } catch (error) { replace(said, message(error)); } finally { button.disabled = false; }
  }}, text);
  return el("span", {class: "action"}, button, said);
}

// ---- parts ----

// table([{name: "Round", of: (row) => cell, number: true}], rows): cells are text or elements.
export function table(columns, rows, {label = "", none = "Nothing yet."} = {}) {
  if (!rows.length) return empty(none);
  return el("div", {class: "scroll", tabindex: "0", role: "region", "aria-label": label || "table"},
    el("table", {},
      el("thead", {}, el("tr", {}, columns.map((column) => el("th", {scope: "col", class: column.number ? "number" : ""}, column.name)))),
      el("tbody", {}, rows.map((row) => el("tr", {}, columns.map((column) => el("td", {class: column.number ? "number" : column.class || ""}, cell(column.of(row)))))))));
}
const cell = (value) => (value === null || value === undefined || value === "" ? "–" : value);

// A list of named values.
export const facts = (pairs) => el("dl", {class: "facts"}, pairs.filter(Boolean).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, cell(value)))));

export const figure = (name, value, note = "") => el("div", {class: "figure"}, el("span", {class: "name"}, name), el("span", {class: "value"}, cell(value)), note && el("span", {class: "note"}, note));

// Shapes distinguish states: filled, hollow, struck, half.
export function state(kind, text) {
  return el("span", {class: `shape ${kind}`}, el("span", {class: "dot", "aria-hidden": "true"}), text);
}

// The shape of a round's state or of a verdict.
const OUTCOMES = {merged: "filled", duplicate: "half", committed: "filled", admitted: "half", collecting: "half", merging: "half", rejected: "struck", refused: "struck"};
export const outcome = (word) => state(OUTCOMES[word] || "hollow", word);

export const section = (title, ...children) => el("section", {}, el("h2", {}, title), children);

export function progress(done, total, label) {
  const share = total > 0 ? Math.min(1, done / total) : 0;
  const bar = el("div", {class: "bar", role: "progressbar", "aria-valuenow": Math.round(100 * share), "aria-valuemin": 0, "aria-valuemax": 100, "aria-label": label});
  const fill = el("span");
  fill.style.width = `${100 * share}%`;
  bar.append(fill);
  return bar;
}

const ROW_FILES = ".jsonl,.json,.ndjson,.csv,.tsv,.parquet,.txt,.gz";

// An area to drop or choose a data file: dropArea({id, taken}). taken(name) is called with its name on the server.
export function dropArea({id, taken}) {
  const bar = el("div");
  const input = el("input", {type: "file", id, class: "visually-hidden", accept: ROW_FILES, disabled: !mayChange(), onchange: () => input.files.length && take(input.files[0])});
  const node = el("div", {class: "drop", ondragover: (event) => { event.preventDefault(); node.dataset.over = "1"; }, ondragleave: () => { delete node.dataset.over; }, ondrop: (event) => {
    event.preventDefault();
    delete node.dataset.over;
    if (mayChange() && event.dataTransfer.files.length) take(event.dataTransfer.files[0]);
  }}, input, el("label", {for: id}, el("span", {class: "button"}, "Choose a file"), " or drop it here: JSONL, JSON, CSV, TSV, Parquet or text"), bar);

  async function take(file) {
    try {
      const name = await upload(file, (done) => replace(bar, progress(done, file.size, `Uploading ${file.name}`)));
      replace(bar, el("p", {class: "small quiet wrap", role: "status"}, `${file.name} is stored as ${name}.`));
      await taken(name);
    } catch (error) { replace(bar, el("p", {class: "problem", role: "alert"}, error instanceof ApiError ? message(error) : `${file.name} could not be read.`)); } finally { input.value = ""; }
  }

  return node;
}

// Send a file in parts, and return its name on the server.
async function upload(file, report) {
  const {id, part_bytes: size} = await post("data/uploads", {name: file.name, bytes: file.size});
  let name = null;
  for (let at = 0; at < file.size; at += size) {
    report(at);
    ({name} = await api(`data/uploads/${id}?offset=${at}`, {method: "PUT", body: await file.slice(at, at + size).arrayBuffer(), headers: {"Content-Type": "application/octet-stream", "X-CSRF-Token": session.csrf}}));
  }
  return name;
}

export function copyable(text, label = "Copy") {
  const code = el("code", {}, text);
  return el("div", {class: "copyable"}, code, copyButton(text, code, {label}));
}

// A button that copies a text; `node` contains it, and is selected if the page may not copy.
export function copyButton(text, node, {label = "Copy", kind = ""} = {}) {
  return el("button", {type: "button", class: kind, onclick: async ({target}) => { target.textContent = (await copied(text, node)) ? "Copied" : "Select it, and press Ctrl+C"; }}, label);
}

// Quote a word for a shell.
export const quoted = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`);

export const commandOf = (job) => job.command.map(quoted).join(" ");

// Pages over plain HTTP from other machines have no clipboard API; they use the old command.
async function copied(text, node) {
  try { await navigator.clipboard.writeText(text); return true; } catch { /* below */ }
  const selection = getSelection(), range = document.createRange();
  range.selectNodeContents(node);
  selection.removeAllRanges();
  selection.addRange(range);
  return document.execCommand("copy");
}

// Render the text of a docstring; text between two backticks is code.
export const marked = (help) => help.replaceAll("``", "`").split("`").map((part, at) => (at % 2 ? el("code", {}, part) : part));

// Encode a path with its folders for a URL.
export const pathUrl = (path) => path.split("/").map(encodeURIComponent).join("/");

// ---- formats ----

export function number(value, digits = 4) {
  if (value === null || value === undefined) return null;
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  if (Math.abs(value) < 1e-4) return Number(value).toExponential(digits - 1);
  const text = Number(value).toPrecision(digits);
  return Math.abs(Number(text)) >= 10 ** digits ? Number(text).toLocaleString("en-US") : text;
}
// A count with its noun: "1 row", "2 rows".
export const count = (value, one, many = `${one}s`) => `${number(value)} ${value === 1 ? one : many}`;
export function signed(value, digits = 4) {
  if (value === null || value === undefined) return null;
  const size = Math.abs(value), isTiny = size > 0 && size < 0.5 * 10 ** -digits; // a small change is not shown as zero
  return `${value >= 0 ? "+" : "−"}${isTiny ? size.toExponential(1) : size.toFixed(digits)}`;
}
export function bytes(value) {
  if (value === null || value === undefined) return null;
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (Math.round(value) >= 1000 && at < units.length - 1) { value /= 1000; at++; }
  return `${at && value < 100 ? value.toFixed(1) : Math.round(value)} ${units[at]}`;
}
export function ago(seconds) {
  if (!seconds) return null;
  const passed = Math.max(0, Date.now() / 1000 - seconds);
  if (passed < 60) return `${Math.round(passed)} s ago`;
  if (passed < 3600) return `${Math.round(passed / 60)} min ago`;
  if (passed < 172800) return `${Math.round(passed / 3600)} h ago`;
  return `${count(Math.round(passed / 86400), "day")} ago`;
}
export function duration(seconds) {
  seconds = Math.max(0, Math.round(seconds));
  const hours = Math.floor(seconds / 3600), minutes = Math.floor((seconds % 3600) / 60);
  return hours ? `${hours} h ${minutes} min` : minutes ? `${minutes} min ${seconds % 60} s` : `${seconds} s`;
}
export const when = (seconds) => (seconds ? new Date(seconds * 1000).toLocaleString() : null);
export const short = (id, length = 12) => el("span", {class: "id", title: id}, id.length > length + 1 ? `${id.slice(0, length)}…` : id);

// The text of --columns: pairs of names, or JSON if a name contains a comma, or starts or ends with a space.
export function columnsText(columns) {
  const names = Object.values(columns);
  return names.some((name) => name.includes(",") || name !== name.trim()) ? JSON.stringify(columns) : Object.entries(columns).map((pair) => pair.join("=")).join(",");
}

export function namedColumns(text) {
  if (text.trim().startsWith("{")) { try { return JSON.parse(text); } catch { return {}; } }
  return Object.fromEntries(text.split(",").filter(Boolean).map((pair) => [pair.slice(0, pair.indexOf("=")).trim(), pair.slice(pair.indexOf("=") + 1).trim()]));
}
