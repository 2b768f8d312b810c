// Three choices: a model, rows and a goal. Each changes the YAML in place, and shows its current value.
import {ApiError, api, bytes, count, dropArea, el, failed, loading, mayChange, message, namedColumns, number, pathUrl, post, replace, say, state} from "../static/app.js";

const KINDS = {package: "comes with gym-fed", cache: "Hugging Face cache", run: "run", folder: "folder", adapter: "adapter", gguf: "GGUF file"};
const MOST_SHOWN = 8, PREVIEW = 3;

// choicesPanel({offered, text(), set(values)}) -> {node, draw(checked)}; `offered` is the answer of train/choices.
export function choicesPanel({offered, text, set}) {
  const change = (values) => set(values).catch((error) => say(message(error)));
  const rows = {facts: null};
  const model = modelChoice({offered, text, change}), goal = goalChoice({offered, change, rows}), data = dataChoice({offered, change, rows, redraw: () => goal.draw(data.checked)});
  return {node: el("div", {class: "choices"}, [model, data, goal].map((one) => one.node), data.preview), draw(checked) { for (const one of [model, data, goal]) one.draw(checked); }};
}

const step = (number, title, ...inside) => el("section", {class: "choice-step", "aria-labelledby": `choice-${number}`}, el("h2", {id: `choice-${number}`}, el("span", {class: "quiet"}, `${number} `), title), inside);

// Replace the content of a node, and keep the focus on the control with the same id, or on the first one if it is gone.
function redraw(node, ...inside) {
  const focused = node.contains(document.activeElement) ? document.activeElement.id : "";
  replace(node, inside);
  if (focused) (document.getElementById(focused) || node.querySelector("input:checked, input, select"))?.focus({preventScroll: true});
}

// ---- the model ----

function modelChoice({offered, text, change}) {
  const memory = new Map();
  let found = [], said = "", checked = null, turn = 0, busy = false;
  const list = el("div", {class: "options", role: "radiogroup", "aria-label": "Models"}), note = el("p", {class: "small quiet", role: "status"});
  const search = el("input", {id: "find-model", type: "search", placeholder: "Find a model, or type its name or folder", "aria-label": "Find a model", autocomplete: "off", spellcheck: "false", disabled: !mayChange(),
    oninput: () => drawList(), onkeydown: (event) => { if (event.key === "Enter" && search.value.trim()) choose({name: search.value.trim()}); }});

  // What is trained: the model, or an adapter of it.
  const now = () => { const {model, adapter} = checked?.given || {}, only = Array.isArray(adapter) && adapter.length === 1 ? adapter[0] : adapter; return typeof only === "string" ? only : model; };
  const choose = async (one) => {
    await change({adapter: null}); // it may be a list, which is not changed to a name
    await change(one.base ? {model: one.base, adapter: one.name} : {model: one.name});
  };

  function shown() {
    const words = search.value.trim().toLowerCase(), given = now();
    const every = [...offered.models.map((one) => ({name: one.id, base: one.base, note: [one.kind !== "adapter" && (KINDS[one.kind] || one.kind), one.base && `adapter of ${one.base}`].filter(Boolean).join(", ") || KINDS.adapter, bytes: one.bytes})), ...found.map((one) => ({...one, isFar: true, note: ["on the Hub", one.downloads !== null && count(one.downloads, "download"), one.gated && "gated"].filter(Boolean).join(", ")}))];
    if (given && !every.some((one) => one.name === given)) every.unshift({name: given, note: checked.missing?.includes(given) ? "not on this machine" : "named in the YAML"});
    const matching = every.filter((one) => one.name.toLowerCase().includes(words));
    return [...matching.filter((one) => one.name === given), ...matching.filter((one) => one.name !== given)];
  }

  function drawList() {
    const every = shown(), words = search.value.trim();
    redraw(list, every.slice(0, MOST_SHOWN).map((one) => option(one, one.name === now())));
    replace(note, every.length > MOST_SHOWN ? `${number(every.length - MOST_SHOWN)} more; type to find one. ` : "", said,
      words && mayChange() && el("button", {type: "button", class: "long", id: "search-hub", onclick: searchHub}, `Search the Hub for “${words}”`),
      words && mayChange() && !every.some((one) => one.name === words) && el("button", {type: "button", class: "long", id: "take-name", onclick: () => choose({name: words})}, `Take “${words}”`));
    weigh(every.slice(0, MOST_SHOWN).filter((one) => !one.isFar && !one.base));
  }

  const key = (name) => JSON.stringify([name, {...checked?.given, model: 0, output_dir: 0}]);

  function option(one, isChosen) {
    const known = memory.get(key(one.name));
    const needs = !known ? "" : known.problem ? "memory not known" : `${bytes(known.peak_bytes)} of memory`;
    return el("label", {class: "option"}, el("input", {type: "radio", name: "model", id: `model-${one.name}`, value: one.name, checked: isChosen, disabled: !mayChange(), onchange: () => choose(one)}),
      el("span", {class: "wrap"}, one.name), el("span", {class: "small quiet wrap"}, [one.note, one.bytes && bytes(one.bytes), needs].filter(Boolean).join(" · ")),
      known && !known.problem && known.available_bytes && known.peak_bytes > known.available_bytes && state("struck", "too large"));
  }

  // The memory of the run on each shown model, one request after the other; the newest list comes first.
  async function weigh(models) {
    if (!mayChange() || !checked || checked.problems.some((one) => one.line)) return;
    const mine = ++turn;
    do await new Promise((then) => setTimeout(then, 1500)); while (busy); // so that a brief visit starts no process
    const unknown = () => models.map((one) => one.name).filter((name) => !memory.has(key(name)));
    if (mine !== turn || !unknown().length || !list.isConnected) return;
    busy = true;
    try {
      while (mine === turn && unknown().length && list.isConnected) {
        const at = (name) => key(name), names = unknown(), keys = new Map(names.map((name) => [name, at(name)]));
        const answer = await post("train/memory", {text: text(), models: names});
        for (const [name, one] of Object.entries(answer)) memory.set(keys.get(name), one);
        if (mine === turn) redraw(list, shown().slice(0, MOST_SHOWN).map((one) => option(one, one.name === now())));
      }
    } catch (error) {
      if (!(error instanceof ApiError)) throw error; // show the size without the memory
    } finally { busy = false; }
  }

  async function searchHub() {
    said = "Searching the Hub…";
    drawList();
    try { ({models: found} = await post("train/search", {query: search.value.trim()})); said = found.length ? "" : "No such model on the Hub. "; } catch (error) { said = `${message(error)} `; }
    drawList();
  }

  return {node: step(1, "Model", search, list, note), draw(news) { checked = news; drawList(); }};
}

// ---- the rows ----

function dataChoice({offered, change, rows, redraw: redrawGoal}) {
  let files = offered.files.map((one) => one.name), seen = "", turn = 0;
  const about = el("div", {class: "stack", role: "status"}), preview = el("section", {"aria-label": "The first rows as the model reads them"}), holder = el("div", {class: "row"});
  const drop = dropArea({id: "rows-file", taken: async (name) => {
    if (!files.includes(name)) files = [name, ...files];
    await choose(name);
  }});
  const part = {node: step(2, "Data", drop, holder, about), preview, checked: null, draw};

  // A new file replaces all sources; unknown columns are guessed, and the goal follows the kind of rows.
  async function choose(name) {
    replace(about, loading(`Reading ${name}`));
    let found = null;
    try { found = await read({path: name}); } catch (error) { if (!(error instanceof ApiError)) throw error; } // shown by draw
    const guess = found?.choices?.guess || {}, columns = Object.keys(guess).length && !guess.text ? guess : null; // the user must choose the use of a single text column
    const kind = columns ? (columns.chosen ? "preference" : "supervised") : found?.kind, given = part.checked.given;
    const goal = kind && !fits(offered.goals, given.algorithm || "sft", kind) ? goalOf(offered.goals, kind, found) : null;
    seen = "";
    await change({data: [{path: name, ...(columns && {columns})}], ...(goal && goalValues(goal, kind, given, offered.graders))});
  }

  const sources = (given) => (Array.isArray(given.data) ? given.data : []);
  function draw(checked) {
    part.checked = checked;
    const given = sources(checked.given), only = given.length === 1 ? given[0] : null, path = only?.path;
    redraw(holder, el("label", {for: "rows-here"}, "or a file of this folder"),
      el("select", {id: "rows-here", disabled: !mayChange(), onchange: (event) => event.target.value && choose(event.target.value)}, el("option", {value: ""}, files.length ? "Choose a file" : "There are none yet"),
        [...new Set([...(path && !files.includes(path) ? [path] : []), ...files])].map((name) => el("option", {value: name, selected: name === path}, name))),
      !given.length && mayChange() && el("button", {type: "button", id: "rows-made", onclick: () => change({data: [{tasks: ["double"], num_examples: 2000}]})}, "No rows at hand? Generate 2,000"));
    const now = JSON.stringify([given, checked.given.model, checked.missing]);
    if (now === seen) return;
    seen = now;
    drawPreview(given, only, checked);
  }

  const read = ({path, format = "auto", columns = {}}, model = "gym-nano") => api(`data/rows?${new URLSearchParams({name: path, model, format, columns: Object.keys(columns).length ? JSON.stringify(columns) : "", limit: PREVIEW})}`);

  async function drawPreview(given, only, checked) {
    const mine = ++turn;
    rows.facts = null;
    replace(preview);
    if (!given.length) { replace(about); return; }
    if (!only?.path || /[*?[]|:\/\//.test(only.path)) { replace(about, el("p", {class: "quiet wrap"}, `${given.map(named).join("; ")}. `, el("a", {href: "/train?tab=yaml"}, "Change them in the YAML"))); return; }
    replace(about, loading(`Reading ${only.path} as the model will`));
    const model = checked.given.model, isHere = model && !checked.missing?.includes(model);
    try {
      const [{bodyOf, columnChooser, headOf}, found] = await Promise.all([import("./dataset.js"), read(only, isHere ? model : "gym-nano").catch((error) => { if (!isHere || model === "gym-nano") throw error; return read(only).then((found) => ({...found, note: error})); })]);
      if (mine !== turn) return;
      rows.facts = found;
      const columns = only.columns && Object.keys(only.columns).length ? only.columns : null;
      replace(about,
        el("p", {class: "small"}, el("b", {class: "wrap"}, only.path), ` · ${found.num_rows === null ? "about " : ""}${count(found.about_rows ?? 0, "row")} · `, found.format === "auto" ? "layout not recognised" : `layout ${found.format}`, " · ", el("a", {href: `/data/${pathUrl(only.path)}${columns ? `?${new URLSearchParams({columns: JSON.stringify(columns)})}` : ""}`}, "all rows")),
        el("p", {class: "small quiet wrap"}, columns ? `Columns: ${Object.entries(columns).map(([ours, theirs]) => `${ours} is “${theirs}”`).join(", ")}. Not read: ${found.columns.filter((name) => !Object.values(columns).includes(name)).join(", ") || "none"}.` : `Columns: ${found.columns.join(", ") || "not readable"}.`),
        found.choices && columnChooser(found.choices, columns ? JSON.stringify(columns) : "", ({columns: chosen}) => change({data: [{...only, columns: namedColumns(chosen)}]})),
        !isHere && el("p", {class: "small quiet"}, "Tokenised as for gym-nano, until the model is on this machine."),
        found.note && el("p", {class: "small quiet wrap"}, `Tokenised as for gym-nano: ${message(found.note)}`));
      replace(preview, el("div", {class: "spread"}, el("h2", {}, "The first rows as the model reads them"), el("div", {class: "legend"}, el("span", {class: "lit"}, "trained on"), el("span", {class: "unlit"}, "only read"))),
        found.rows.map((row) => el("article", {class: "datarow", "aria-label": row.place}, headOf(row), bodyOf(row))));
    } catch (error) { if (mine === turn) replace(about, failed(error)); }
    if (mine === turn) redrawGoal();
  }

  return part;
}

const named = (source) => (source.tasks ? `${source.num_examples ? `${count(source.num_examples, "generated row")}` : "Generated rows"} of ${source.tasks.join(", ")}` : source.path || source.name || source.hub || source.dataset || "rows");

// ---- the goal ----

const fits = (goals, algorithm, kind) => goals.some((goal) => goal.algorithms.some((one) => one.name === algorithm && one.rows === kind));
const hasTools = (facts) => Boolean(facts?.columns?.includes("tools"));

// The goal that rows of a kind are intended for.
function goalOf(goals, kind, facts) {
  const fitting = goals.filter((goal) => goal.algorithms.some((one) => one.rows === kind));
  return (hasTools(facts) && fitting.find((goal) => goal.needs === "tools")) || fitting[0] || null;
}

// The keys of a goal: the algorithm that reads the rows, and a grader if it needs one.
function goalValues(goal, kind, given, graders) {
  const {name} = goal.algorithms.find((one) => one.rows === kind) || goal.algorithms[0];
  return {algorithm: name, ...(goal.graded && !given.graders?.length && {graders: [{grader: graders[0]}]}), ...(!goal.graded && given.graders?.length && {graders: null})};
}

function goalChoice({offered, change, rows}) {
  const holder = el("div", {class: "stack"});
  let chosen = "", checked = null;

  function draw(news) {
    checked = news;
    const algorithm = checked.given.algorithm || "sft", able = offered.goals.filter((goal) => goal.algorithms.some((one) => one.name === algorithm));
    const now = able.find((goal) => goal.name === chosen) || (hasTools(rows.facts) && able.find((goal) => goal.needs === "tools")) || able[0];
    const kind = rows.facts?.kind;
    const lacks = now?.needs && rows.facts && !rows.facts.columns.includes(now.needs);
    redraw(holder, el("div", {class: "goals options", role: "radiogroup", "aria-label": "Goals"}, offered.goals.map((goal) => el("label", {class: "option"},
      el("input", {type: "radio", name: "goal", id: `goal-${goal.name}`, checked: goal === now, disabled: !mayChange(), onchange: () => choose(goal, kind, algorithm)}),
      el("span", {}, goal.title), el("span", {class: "small quiet"}, goal.help)))),
    now?.graded && graderChoice(),
    lacks && el("p", {class: "problem"}, `These rows have no column “${now.needs}”, so tool calls are not trained.`),
    el("p", {class: "small quiet"}, now ? `Algorithm: ${algorithm}` : `Algorithm: ${algorithm}, set in the YAML`));
  }

  function choose(goal, kind, algorithm) {
    chosen = goal.name;
    const values = goalValues(goal, kind, checked.given, offered.graders);
    change(values);
    if (values.algorithm === algorithm) draw(checked); // otherwise the new text is checked first
  }

  function graderChoice() {
    const now = checked.given.graders?.length === 1 ? checked.given.graders[0].grader : "";
    return el("div", {class: "field"}, el("label", {for: "grader"}, "Who scores the answers"),
      el("select", {id: "grader", disabled: !mayChange(), onchange: (event) => event.target.value && change({graders: [{grader: event.target.value}]})},
        !offered.graders.includes(now) && el("option", {value: "", selected: true}, now ? `${now}, set in the YAML` : "several, set in the YAML"), offered.graders.map((name) => el("option", {value: name, selected: name === now}, name))),
      el("span", {class: "help"}, "exact, numeric and math_verify compare with the row’s answer; others need keys: add them in the YAML."));
  }

  return {node: step(3, "Goal", holder), draw};
}
