// Hyperparameter searches: the list, a new search from its text and the form of its space, and a search with its trials.
import {action, ago, api, copyable, el, marked, mayChange, navigate, number, post, replace, section, state, table} from "../static/app.js";
import {editor} from "./yaml_editor.js";

export const title = "Tune";
const DRAFT = "gym.tune.draft";
const FIRST = `# What all trials have in common. The keys are those of gym train.
model: gym-nano
output_dir: runs/search
data: [{tasks: [double], num_examples: 500}]
eval_data: [{tasks: [double], num_examples: 50, seed: 1}]
max_steps: 40
eval_steps: 10
per_device_train_batch_size: 16
finetuning: lora

search:
  metric: eval_loss
  direction: minimize
  num_trials: 12
  parameters:
    learning_rate: {low: 1.0e-4, high: 1.0e-1, log: true}
    lora.r: {choices: [2, 4, 8]}
`;

export async function show(root, parameters, query) {
  if (query.get("search")) { await (await import("./search.js")).search(root, query.get("search")); return; }
  const {form, searches, total, runs} = await api("tune");
  root.append(el("header", {}, el("h1", {}, "Tune"), el("p", {class: "quiet small mono"}, runs)), section("Searches", listOf(searches),
    total > searches.length && el("p", {class: "quiet"}, `The newest ${number(searches.length)} of ${number(total)} searches.`)), newSearch(form));
}

export const shapeOf = (one) => (one.is_running ? state("half", "running") : one.ended >= one.wanted ? state("filled", "finished") : state("hollow", "stopped"));
export const valueOf = (value) => (typeof value === "number" && !Number.isInteger(value) ? String(Number(value.toPrecision(4))) : typeof value === "string" ? value : JSON.stringify(value));
const settingsOf = (parameters) => Object.entries(parameters).map(([key, value]) => `${key} ${valueOf(value)}`).join(", ");

function listOf(searches) {
  return table([
    {name: "Search", of: (one) => el("a", {href: `/tune?${new URLSearchParams({search: one.path})}`}, one.path), class: "reason"},
    {name: "State", of: shapeOf},
    {name: "Trials", of: (one) => `${number(one.ended)} of ${number(one.wanted)}`, number: true},
    {name: "Metric", of: (one) => `${one.metric}, ${one.direction}`},
    {name: "Best", of: (one) => one.best && number(one.best.value, 5), number: true},
    {name: "Best settings", of: (one) => one.best && settingsOf(one.best.parameters), class: "reason small"},
    {name: "Changed", of: (one) => ago(one.changed), number: true},
  ], searches, {label: "Searches", none: "No searches yet. Describe one below and start it."});
}

function newSearch(form) {
  const space = el("div", {class: "form"}), actions = el("div", {class: "before"});
  if (!mayChange()) replace(space, el("p", {class: "quiet"}, "Only operators can start searches."));
  const yaml = editor({
    label: "Configuration of the search, YAML", value: localStorage.getItem(DRAFT) || FIRST, readonly: !mayChange(),
    check: (given) => (mayChange() ? post("tune/check", {text: given}) : null),
    typed: (given) => localStorage.setItem(DRAFT, given),
    shown: (found) => {
      const focused = document.activeElement?.id;
      replace(space, ...spaceForm(form, found.search, (changed) => { text.value = withSearch(text.value, changed); yaml.changed(0); }));
      if (focused && focused !== "yaml") document.getElementById(focused)?.focus();
      replace(actions, found.problems.length ? null : [
        found.exists && el("p", {class: "quiet"}, `${found.path} contains a search. The same text resumes it; a different one is refused.`),
        el("div", {class: "row"}, action(found.exists ? "Resume the search" : "Start the search", async () => {
          const {path} = await post("tune/start", {text: text.value});
          navigate(`/tune?${new URLSearchParams({search: path})}`);
        }, {primary: true}), el("a", {class: "button", download: "search.yaml", href: URL.createObjectURL(new Blob([text.value], {type: "application/yaml"}))}, "Download YAML")),
        copyable("gym tune search.yaml")]);
    },
  });
  const text = yaml.area;
  return section("New search", el("div", {class: "workbench"},
    el("div", {class: "stack"}, yaml.node, yaml.problems, actions),
    el("div", {class: "stack"}, el("h3", {}, "Search space"), space)));
}

// ---- the form of the space, which writes the section `search` of the text ----

function spaceForm(form, given, changed) {
  const search = {...given, parameters: {...(given.parameters || {})}};
  const keys = el("datalist", {id: "keys"}, form.keys.map((field) => el("option", {value: field.key}, field.kind)));
  const fresh = el("input", {id: "new-key", list: "keys", placeholder: "learning_rate", autocomplete: "off"});
  const add = () => {
    const key = fresh.value.trim(), kind = form.keys.find((field) => field.key === key)?.kind;
    if (!key || search.parameters[key]) return;
    search.parameters[key] = kind === "number" ? {low: 0.0001, high: 0.1, log: true} : kind === "integer" ? {low: 1, high: 8, integer: true} : {choices: kind === "boolean" ? [true, false] : ["a", "b"]};
    changed(search);
  };
  return [keys,
    ...Object.entries(search.parameters).map(([key, range]) => parameterForm(key, range && typeof range === "object" ? range : {}, (now) => { if (now === null) delete search.parameters[key]; else search.parameters[key] = now; changed(search); })),
    el("form", {class: "row", onsubmit: (event) => { event.preventDefault(); add(); }}, el("label", {for: "new-key"}, "Search over"), fresh, el("button", {}, "Add")),
    el("h3", {}, "Judged by"),
    ...form.settings.map((field) => settingForm(field, search, changed))];
}

function parameterForm(key, range, changed) {
  const isChoices = Array.isArray(range.choices), id = (name) => `space-${key}-${name}`;
  const box = (name, value, more = {}) => el("div", {class: "field"}, el("label", {for: id(name)}, name), el("input", {id: id(name), value: value ?? "", autocomplete: "off", ...more}));
  const set = (name, text) => { const number = Number(text); changed({...range, [name]: text.trim() === "" || !Number.isFinite(number) ? text : number}); };
  const check = (name) => el("label", {class: "choice"}, el("input", {type: "checkbox", checked: Boolean(range[name]), onchange: (event) => { const now = {...range}; if (event.target.checked) now[name] = true; else delete now[name]; changed(now); }}), ` ${name}`);
  const choices = (range.choices || []).map((one) => JSON.stringify(one)).join(", ");
  return el("fieldset", {class: "space"}, el("legend", {class: "mono"}, key),
    el("div", {class: "row"},
      isChoices ? box("choices", choices, {onchange: (event) => { try { changed({choices: JSON.parse(`[${event.target.value}]`)}); } catch { event.target.setAttribute("aria-invalid", "true"); } }})
        : [box("low", range.low, {class: "short", onchange: (event) => set("low", event.target.value)}), box("high", range.high, {class: "short", onchange: (event) => set("high", event.target.value)}), check("log"), check("integer")],
      el("button", {type: "button", onclick: () => changed(isChoices ? {low: 0.1, high: 1} : {choices: [range.low ?? 1, range.high ?? 2]})}, isChoices ? "As a range" : "As choices"),
      el("button", {type: "button", "aria-label": `Remove ${key}`, onclick: () => changed(null)}, "Remove")));
}

function settingForm(field, search, changed) {
  const id = `search-${field.key.replaceAll(".", "-")}`, [head, inner] = field.key.split(".");
  const value = inner ? search[head]?.[inner] : search[head];
  const set = (text) => {
    const isNumber = field.kind === "integer" || field.kind === "number";
    const now = text === "" ? undefined : isNumber && Number.isFinite(Number(text)) ? Number(text) : text;
    if (inner) search[head] = {...(search[head] || {}), [inner]: now}; else search[head] = now;
    changed(search);
  };
  const control = field.kind === "choice"
    ? el("select", {id, onchange: (event) => set(event.target.value)}, el("option", {value: ""}, `${field.default} (default)`), field.choices.map((choice) => el("option", {value: choice, selected: choice === value}, choice)))
    : el("input", {id, value: value ?? "", placeholder: field.default ?? "", onchange: (event) => set(event.target.value.trim())});
  return el("div", {class: "field key"}, el("label", {for: id}, field.key), control, field.help && el("p", {class: "help"}, marked(field.help)));
}

// Return the text with a new section `search`; the rest is unchanged.
function withSearch(text, search) {
  const lines = text.split("\n"), from = lines.findIndex((line) => /^search\s*:/.test(line));
  let to = from + 1;
  while (from >= 0 && to < lines.length && !/^[^\s#]/.test(lines[to])) to++;
  const {parameters, ...rest} = search;
  const flow = (value) => (Array.isArray(value) ? `[${value.map(flow).join(", ")}]` : value && typeof value === "object" ? `{${Object.entries(value).filter(([, one]) => one !== undefined).map(([key, one]) => `${key}: ${flow(one)}`).join(", ")}}` : typeof value === "number" ? yamlNumber(value) : typeof value === "string" && /^[A-Za-z_][\w-]*$/.test(value) && !/^(true|false|null|yes|no|on|off|y|n)$/i.test(value) ? value : JSON.stringify(value));
  const block = ["search:", ...Object.entries(rest).filter(([, value]) => value !== undefined).map(([key, value]) => `  ${key}: ${flow(value)}`), "  parameters:", ...Object.entries(parameters).map(([key, range]) => `    ${key}: ${flow(range)}`)];
  return (from < 0 ? [...lines, ...block, ""] : [...lines.slice(0, from), ...block, ...(to < lines.length ? ["", ...lines.slice(to)] : [""])]).join("\n");
}

// YAML 1.1 reads 1e-4 as text; a decimal point makes it a number.
function yamlNumber(value) {
  const text = String(value);
  return text.includes("e") && !text.includes(".") ? text.replace("e", ".0e") : text;
}
