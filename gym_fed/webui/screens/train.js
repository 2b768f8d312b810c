// Training: the YAML is the truth. The form beside it edits it in place, the reader of `gym train` checks it as one types.
import {action, api, bytes, copyable, duration, el, facts, loading, marked, mayChange, namedColumns, navigate, number, pathUrl, post, remember, replace, say, state} from "../static/app.js";
import {editor} from "./yaml_editor.js";

export const title = "Train";

const DRAFT = "gym.train.draft";
const FIRST = `# What is learnt, from which model, on which rows. The form beside this changes it in place.
algorithm: sft
model: gym-nano
output_dir: runs/my-run

data:
  - tasks: [double]
    num_examples: 2000

max_steps: 100
`;

export async function show(root, parameters, query) {
  replace(root, el("header", {}, el("h1", {}, "Train")), loading());
  const form = await api("train/form"), {recipes} = form;
  const fields = form.groups.flatMap((group) => group.fields);
  let checked = null, agreed = false, overwrite = false;

  const yaml = editor({
    label: "Configuration, YAML", value: localStorage.getItem(DRAFT) || FIRST, readonly: !mayChange(),
    check: (given) => (mayChange() ? post("train/check", {text: given}) : null),
    shown: (found) => { checked = found; drawForm(); drawActions(); },
    typed: (given) => { agreed = overwrite = false; localStorage.setItem(DRAFT, given); remember({recipe: ""}); },
  });
  const text = yaml.area;
  const recipe = el("select", {"aria-label": "Begin with a recipe", onchange: () => recipe.value && begin(recipe.value)},
    el("option", {value: ""}, "Begin with a recipe…"), recipes.flatMap((one) => (one.sizes.length > 1 ? one.sizes.map((size) => el("option", {value: `${one.name}\u0000${size}`}, `${one.name}, ${size}`)) : [el("option", {value: one.name}, one.name)])));
  const summary = el("p", {class: "small quiet"});
  const actions = el("div", {class: "before"});
  const holder = el("div", {class: "form"});
  const search = el("input", {type: "search", id: "find-key", placeholder: "Find a key", "aria-label": "Find a key", oninput: () => drawForm()});

  replace(root, el("header", {}, el("h1", {}, "Train"), el("div", {class: "row"}, recipe)),
    el("div", {class: "workbench"},
      el("section", {class: "editor-side"}, el("div", {class: "spread"}, el("h2", {}, "Configuration"), summary), yaml.node, yaml.problems, actions),
      el("section", {class: "form-side"}, el("div", {class: "spread"}, el("h2", {}, "Keys"), search), holder)));

  async function begin(value) {
    const [name, size] = value.split("\u0000");
    if (text.value.trim() && text.value !== FIRST && localStorage.getItem(DRAFT) && !window.confirm("Replace the text with this recipe?")) { recipe.value = ""; return; }
    const found = await api(`train/recipes/${encodeURIComponent(name)}${size ? `?size=${encodeURIComponent(size)}` : ""}`);
    localStorage.removeItem(DRAFT);
    summary.textContent = recipes.find((one) => one.name === name)?.summary || "";
    agreed = overwrite = false;
    yaml.set(found.text);
    remember({recipe: name});
  }

  // ---- the form ----

  async function set(field, value, input) {
    try {
      const {text: edited} = await post("train/edit", {text: text.value, key: field.key, value});
      input.removeAttribute("aria-invalid");
      text.value = edited;
      yaml.changed(1);
    } catch (error) {
      input.setAttribute("aria-invalid", "true");
      say(`${error.message}. ${error.hint || ""}`);
    }
  }

  function input(field, id) {
    const value = checked?.given?.[field.key];
    const isGiven = value !== undefined && value !== null;
    const off = !mayChange();
    const chosen = checked?.chosen?.find((one) => one.key === field.key);
    const standard = chosen ? chosen.value : field.default ?? null;
    if (field.kind === "yaml") return el("button", {type: "button", id, onclick: () => toKey(field.key)}, isGiven ? `line ${lineOf(field.key)}` : "in the text");
    if (field.kind === "choice" || field.kind === "boolean") {
      const choices = field.kind === "boolean" ? [true, false] : field.choices;
      const none = standard === null ? "–" : `${standard} (default)`;
      return el("select", {id, disabled: off, class: isGiven ? "given" : "", onchange: (event) => set(field, event.target.value === "" ? null : choices[Number(event.target.value)], event.target)},
        el("option", {value: ""}, none), choices.map((choice, at) => el("option", {value: at, selected: isGiven && choice === value}, String(choice))));
    }
    const isNumber = field.kind === "integer" || field.kind === "number";
    return el("input", {id, disabled: off, type: "text", inputmode: isNumber ? "decimal" : "text", class: `${isGiven ? "given" : ""} ${isNumber ? "number" : ""}`, value: isGiven ? String(value) : "", placeholder: standard === null ? "" : String(standard), title: chosen?.reason ?? "", onchange: (event) => {
      const typed = event.target.value.trim();
      if (typed === "") { set(field, null, event.target); return; }
      const parsed = isNumber ? Number(typed) : typed;
      if (isNumber && !Number.isFinite(parsed)) { event.target.setAttribute("aria-invalid", "true"); say(`${field.key}: ${typed} is no number.`); return; }
      set(field, parsed, event.target);
    }});
  }

  const lineOf = (key) => { const at = text.value.split("\n").findIndex((line) => line.trimStart().replace(/^- /, "").startsWith(`${key.split(".").pop()}:`)); return at < 0 ? "?" : at + 1; };
  function toKey(key) {
    const line = lineOf(key);
    if (line === "?") {
      if (!mayChange()) return;
      const [head, inner] = key.split(".");
      text.value += `${text.value.endsWith("\n") || !text.value ? "" : "\n"}${head}:${inner ? `\n  ${inner}: ` : " "}`;
      yaml.changed();
      text.focus();
      text.setSelectionRange(text.value.length, text.value.length);
    } else yaml.goTo(line, 1);
  }

  function row(field) {
    const id = `key-${field.key.replaceAll(".", "-")}`;
    return el("div", {class: "field key"}, el("label", {for: id}, field.key), input(field, id), field.help && el("p", {class: "help"}, marked(field.help)));
  }

  // The rows: a file of this folder takes the place of the whole section `data`.
  let files = [];
  api("data").then((found) => { files = found.files.map((one) => one.name); if (checked) drawForm(); }).catch(() => {});
  function rowsRow() {
    const now = checked?.given?.data;
    const own = Array.isArray(now) && now.length === 1 && files.includes(now[0].path) ? now[0].path : "";
    return el("div", {class: "field key"}, el("label", {for: "key-data"}, "data"),
      el("select", {id: "key-data", class: own ? "given" : "", disabled: !mayChange(), onchange: (event) => { text.value = withRows(text.value, event.target.value); yaml.changed(1); }},
        !own && el("option", {value: "", selected: true}, now === undefined ? "choose a file" : `line ${lineOf("data")}`), files.map((name) => el("option", {value: name, selected: name === own}, name))),
      el("p", {class: "help"}, "A file below this folder; other sources, and several, stand in the text. ", el("a", {href: own ? `/data/${pathUrl(own)}` : "/data"}, own ? "Look at its rows" : "Look at data")));
  }

  // A section of another algorithm or tuning method is not shown, unless it is looked for.
  function belongs(field) {
    if (!field.section) return true;
    const values = checked?.given || {};
    if (form.algorithms.includes(field.section)) return field.section === (values.algorithm || "sft");
    if (form.tuning.includes(field.section)) return field.section === (values.finetuning || "full");
    return true;
  }

  const opened = new Set();
  function drawForm() {
    const focused = document.activeElement?.id, words = search.value.trim().toLowerCase();
    if (words) {
      const found = fields.filter((field) => field.key.includes(words) || field.help.toLowerCase().includes(words)).sort((one, other) => other.key.includes(words) - one.key.includes(words)).slice(0, 30);
      replace(holder, found.length ? found.map(row) : el("p", {class: "quiet"}, `No key matches “${search.value}”.`));
    } else {
      const first = form.first.map((key) => fields.find((field) => field.key === key)).filter(Boolean);
      replace(holder, first.flatMap((field) => (field.key === "model" ? [row(field), rowsRow()] : [row(field)])), form.groups.map((group) => {
        const own = group.fields.filter((field) => !form.first.includes(field.key) && belongs(field));
        if (!own.length) return null;
        const count = own.filter((field) => checked?.given?.[field.key] !== undefined).length;
        const inside = el("div", {class: "form inner"});
        const filled = () => { if (!inside.firstChild) inside.append(...sections(own)); };
        if (opened.has(group.title)) filled();
        return el("details", {open: opened.has(group.title), ontoggle: (event) => { if (event.target.open) { opened.add(group.title); filled(); } else opened.delete(group.title); }},
          el("summary", {}, group.title, count > 0 && el("span", {class: "count"}, ` ${count} set`)), inside);
      }));
    }
    if (focused?.startsWith("key-")) document.getElementById(focused)?.focus();
  }

  function sections(own) {
    const nodes = [];
    let section = "";
    for (const field of own) {
      if (field.section && field.section !== section) nodes.push(el("h3", {class: "section-name"}, field.section), field.section_help && el("p", {class: "help small quiet"}, marked(field.section_help)));
      section = field.section || "";
      nodes.push(row(field));
    }
    return nodes.filter(Boolean);
  }

  // ---- before the start ----

  const estimate = el("div", {class: "estimate", role: "status"});
  let estimated = "";

  function drawActions() {
    const isValid = !checked.problems.length;
    if (estimated !== text.value) replace(estimate);
    const {taken, path, missing, leaves} = checked;
    const name = `${(path || "my-run").split("/").pop().replace(/[^\w.-]+/g, "-")}.yaml`;
    replace(actions, !isValid ? null : [
      el("div", {}, el("h3", {}, "What leaves this machine"), leaves.length ? el("ul", {}, leaves.map((line) => el("li", {}, line))) : el("p", {}, "Nothing.")),
      missing.length > 0 && download(missing),
      taken === "unfinished" && el("p", {class: "problem"}, `runs of this name: ${path} was stopped. The same configuration goes on from its checkpoint; another is refused.`),
      taken === "finished" && el("p", {}, el("label", {class: "choice"}, el("input", {type: "checkbox", onchange: (event) => { overwrite = event.target.checked; drawStart(); }}), ` ${path} holds a finished run. Delete it first.`)),
      taken === "running" && el("p", {class: "problem"}, "A run is at work there. ", el("a", {href: `/runs/${pathUrl(path)}`}, "Watch it"), ", or choose another output_dir."),
      el("div", {class: "row"}, start, action("Will it fit?", plan), el("a", {class: "button", download: name, href: URL.createObjectURL(new Blob([text.value], {type: "application/yaml"}))}, "Download YAML")),
      estimate,
      el("div", {}, el("p", {class: "small quiet"}, "The same on the command line, with the downloaded file"), copyable(`gym train ${name}${overwrite ? " --overwrite" : ""}`))]);
    drawStart();
  }

  const start = el("span");
  function drawStart() {
    const {taken, missing} = checked;
    const isBlocked = taken === "running" || (taken === "finished" && !overwrite) || (missing.length > 0 && !agreed);
    const button = action("Start training", async () => {
      const {path} = await post("train/start", {text: text.value, yes: agreed, overwrite});
      localStorage.setItem(DRAFT, text.value); // a run that fails leads back to it
      navigate(`/runs/${pathUrl(path)}`);
    }, {primary: true, confirm: overwrite ? "Delete the finished run, and train anew?" : ""});
    button.querySelector("button").disabled = isBlocked;
    replace(start, button);
  }

  function download(missing) {
    const said = el("div", {role: "status"});
    return el("div", {class: "panel"}, el("h3", {}, "A model is not on this machine"), missing.map((name) => el("p", {class: "mono"}, name)),
      action("What would be fetched?", async () => {
        const offers = [];
        for (const name of missing) offers.push(await post("train/offer", {name}));
        replace(said, offers.map((offer) => el("p", {}, offer.describe)), el("label", {class: "choice"}, el("input", {type: "checkbox", onchange: (event) => { agreed = event.target.checked; drawStart(); }}), " Fetch it when the run starts"));
      }), said, el("p", {class: "small quiet"}, "Without a network: fetch it where there is one by `gym models pull`, copy the folder here, and give its path as model."));
  }

  async function plan() {
    replace(estimate, el("p", {class: "quiet"}, "Timing a few blocks on this machine…"));
    const asked = text.value;
    try {
      const found = await post("train/plan", {text: asked});
      estimated = asked;
      const share = found.available_bytes ? found.peak_bytes / found.available_bytes : null;
      const fits = share === null ? state("hollow", `this machine has no ${found.device}`) : share < 0.85 ? state("filled", "It fits") : share < 1 ? state("half", "It fits barely") : state("struck", "It does not fit");
      replace(estimate, el("p", {}, fits), facts([
        ["Memory at the peak", `${bytes(found.peak_bytes)}${found.available_bytes ? ` of ${bytes(found.available_bytes)} on ${found.device}` : ""}`],
        ["Time", found.steps && found.seconds_per_step ? `${duration(found.steps * found.seconds_per_step)}, ${found.seconds_per_step.toFixed(2)} s a step` : "not known"],
        ["Steps", found.steps ? number(found.steps) : "as many as the rows give"],
        ["Weights", `${number(found.weights)}, of which ${number(found.trained)} are trained`],
        ...Object.entries(found.memory || {}).filter(([, value]) => value).map(([key, value]) => [key.replaceAll("_", " "), bytes(value)])]));
    } catch (error) { replace(estimate); throw error; }
  }

  if (!mayChange()) { replace(yaml.problems, el("p", {class: "quiet"}, "You may look; an operator trains.")); drawForm(); }
  const draft = localStorage.getItem(DRAFT);
  if (query.get("data")) {
    if (!draft || draft === FIRST || window.confirm("Replace the rows in the text that is being written here?")) text.value = withRows(draft || FIRST, query.get("data"), query.get("columns"), query.get("format"));
    remember({data: "", columns: "", format: ""});
    yaml.changed(1);
  } else if (query.get("recipe") && recipes.some((one) => one.name === query.get("recipe"))) { localStorage.removeItem(DRAFT); await begin(query.get("recipe")); }
}

// The text with one file as its rows; all else stays as it was written.
function withRows(text, name, columns = "", format = "") {
  const lines = text.split("\n"), from = lines.findIndex((line) => /^data\s*:/.test(line));
  let to = from < 0 ? lines.length : from + 1;
  while (from >= 0 && to < lines.length && /^([ #-]|$)/.test(lines[to])) to++;
  while (to > from + 1 && from >= 0 && !lines[to - 1].trim()) to--;
  const pairs = Object.entries(namedColumns(columns || "")).map((pair) => pair.map((word) => JSON.stringify(word)).join(": "));
  const rows = ["data:", `  - path: ${/^[\w./-]+$/.test(name) ? name : JSON.stringify(name)}`, ...(format && format !== "auto" ? [`    format: ${/^\w+$/.test(format) ? format : JSON.stringify(format)}`] : []), ...(pairs.length ? [`    columns: {${pairs.join(", ")}}`] : [])];
  if (from < 0) { while (lines.length && !lines.at(-1).trim()) lines.pop(); return [...lines, "", ...rows, ""].join("\n"); }
  return [...lines.slice(0, from), ...rows, ...lines.slice(to)].join("\n");
}
