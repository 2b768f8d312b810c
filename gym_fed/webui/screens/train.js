// Training: three choices, all keys, or the YAML, which is authoritative; `gym train`'s reader checks it while typing.
import {action, api, bytes, copyable, count, duration, el, facts, leave, loading, mayChange, message, namedColumns, navigate, number, pathUrl, post, remember, replace, say, state} from "../static/app.js";
import {choicesPanel} from "./train_choices.js";
import {editor} from "./yaml_editor.js";

export const title = "Train";

const DRAFT = "gym.train.draft";
const TABS = [["choices", "Choices"], ["more", "More"], ["yaml", "YAML"]];
const READING = "Reading the model and the rows";
const LONG_SECONDS = 900, CAPS = [[600, "10 minutes"], [1800, "30 minutes"], [7200, "2 hours"]];
const first = (free) => `# The run, as gym train reads it. The other tabs change it in place.\nmodel: gym-nano\noutput_dir: ${free}\n`;

export async function show(root, parameters, query) {
  replace(root, el("header", {}, el("h1", {}, "Train")), loading());
  const offered = await api("train/choices"), {recipes} = offered, FIRST = first(offered.free);
  let checked = null, checkedText = "", agreed = false, overwrite = false, keys = null;

  const yaml = editor({
    label: "Configuration, YAML", value: localStorage.getItem(DRAFT) || FIRST, untouched: FIRST, readonly: !mayChange(),
    check: (given) => (mayChange() ? post("train/check", {text: given}) : null),
    shown: (found) => { checked = found; checkedText = text.value; draw(); },
    typed: (given) => { agreed = overwrite = false; localStorage.setItem(DRAFT, given); remember({recipe: ""}); },
    seek: () => open("yaml"),
  });
  const text = yaml.area;
  const set = async (values) => {
    const {text: edited} = await post("train/edit", {text: text.value, values});
    if (edited === text.value) return;
    text.value = edited;
    yaml.changed(1);
  };
  const choices = choicesPanel({offered, text: () => text.value, set});
  const recipe = el("select", {"aria-label": "Start from a recipe", disabled: !mayChange(), onchange: () => recipe.value && begin(recipe.value)},
    el("option", {value: ""}, "Start from a recipe…"), recipes.flatMap((one) => (one.sizes.length > 1 ? one.sizes.map((size) => el("option", {value: `${one.name}\u0000${size}`}, `${one.name}, ${size}`)) : [el("option", {value: one.name}, one.name)])));
  const summary = el("p", {class: "small quiet"}), actions = el("div", {class: "before"}), more = el("div");
  const panels = {choices: choices.node, more, yaml: el("div", {class: "stack"}, yaml.node)};

  // ---- tabs ----

  const tabs = TABS.map(([name, words]) => el("button", {type: "button", role: "tab", id: `tab-${name}`, "aria-controls": `panel-${name}`, onclick: () => open(name)}, words));
  const list = el("div", {class: "tabs", role: "tablist", "aria-label": "Ways to set up the run", onkeydown: (event) => {
    const step = {ArrowRight: 1, ArrowLeft: -1}[event.key], at = tabs.indexOf(document.activeElement);
    if (!step || at < 0) return;
    open(TABS[(at + step + TABS.length) % TABS.length][0]);
    list.querySelector("[aria-selected=true]").focus();
  }}, tabs);

  function open(name) {
    for (const [at, [other]] of TABS.entries()) {
      tabs[at].setAttribute("aria-selected", String(other === name));
      tabs[at].tabIndex = other === name ? 0 : -1;
      panels[other].hidden = other !== name;
    }
    remember({tab: name === "choices" ? "" : name});
    if (name === "yaml") yaml.shown();
    if (name === "more" && !keys) drawKeys();
  }

  async function drawKeys() {
    replace(more, loading());
    const [{keysPanel}, form] = await Promise.all([import("./train_keys.js"), api("train/form")]);
    keys = keysPanel({form, area: text, set, append: (line) => { text.value += line; yaml.changed(); open("yaml"); text.focus(); text.setSelectionRange(text.value.length, text.value.length); }, goTo: yaml.goTo});
    replace(more, keys.node);
    if (checked) keys.draw(checked);
  }

  for (const [name] of TABS) for (const [key, value] of [["role", "tabpanel"], ["id", `panel-${name}`], ["aria-labelledby", `tab-${name}`]]) panels[name].setAttribute(key, value);
  replace(root, el("header", {}, el("h1", {}, "Train"), el("div", {class: "row"}, summary, recipe)), list,
    el("div", {class: "workbench training"}, el("div", {}, Object.values(panels)), el("section", {class: "panel start", "aria-label": "Start"}, yaml.problems, actions)));
  open(TABS.some(([name]) => name === query.get("tab")) ? query.get("tab") : "choices");

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

  // ---- before the start ----

  function draw() {
    choices.draw(checked);
    if (keys) keys.draw(checked);
    drawActions();
  }

  const estimate = el("div", {class: "estimate", role: "status"}), start = el("span");
  const run = el("input", {id: "run-name", type: "text", spellcheck: "false", autocomplete: "off", disabled: !mayChange(), onchange: () => set({output_dir: run.value.trim() || null}).catch((error) => say(message(error)))});

  function drawActions() {
    const {taken, path, missing, leaves, free} = checked, isValid = !checked.problems.length;
    const name = `${(path || "my-run").split("/").pop().replace(/[^\w.-]+/g, "-")}.yaml`;
    if (document.activeElement !== run) run.value = checked.given.output_dir ?? "";
    const other = free && action(`Call it ${free}`, () => set({output_dir: free}));
    const focused = actions.contains(document.activeElement) && document.activeElement.id;
    const fields = el("div", {class: "field"}, el("label", {for: "run-name"}, "Folder of the run"), run);
    const choose = checked.problems.map((one) => one.choose).filter(Boolean), next = choose.length === checked.problems.length ? `Choose ${choose.join(" and ")} first` : "Correct the problems first";
    replace(actions, fields, !isValid && el("div", {class: "row"}, el("button", {type: "button", class: "primary", disabled: true, "aria-describedby": "start-waits"}, "Start"), el("span", {id: "start-waits", class: "quiet small"}, next)), isValid && [
      missing.length > 0 && download(missing),
      taken === "unfinished" && el("p", {class: "problem"}, `${path} was stopped. The same configuration resumes from its checkpoint; a different one is refused.`),
      taken === "unfinished" && other,
      taken === "finished" && el("div", {class: "stack"}, el("p", {}, `${path} contains a finished run.`), other, el("label", {class: "choice"}, el("input", {type: "checkbox", checked: overwrite, onchange: (event) => { overwrite = event.target.checked; drawStart(); }}), " Or delete it first")),
      taken === "running" && el("p", {class: "problem"}, "A run is in progress there. ", el("a", {href: `/runs/${pathUrl(path)}`}, "Watch it"), ", or choose another folder."),
      taken === "running" && other,
      el("div", {class: "row"}, start, estimate),
      el("div", {}, el("h3", {}, "What leaves this machine"), leaves.length ? el("ul", {}, leaves.map((line) => el("li", {}, line))) : el("p", {}, "Nothing.")),
      el("details", {}, el("summary", {}, "On the command line"), el("div", {class: "stack"}, copyable(`gym train ${name}${overwrite ? " --overwrite" : ""}`),
        el("a", {class: "button", download: name, href: URL.createObjectURL(new Blob([text.value], {type: "application/yaml"}))}, "Download YAML")))]);
    if (focused) document.getElementById(focused)?.focus({preventScroll: true});
    if (isValid) { drawStart(); drawEstimate(); }
  }

  function drawStart() {
    const {taken, missing} = checked;
    const isBlocked = taken === "running" || (taken === "finished" && !overwrite) || (missing.length > 0 && !agreed);
    const button = action("Start", async () => {
      const {path} = await post("train/start", {text: text.value, yes: agreed, overwrite});
      localStorage.setItem(DRAFT, text.value); // a failed run leads back to it
      navigate(`/runs/${pathUrl(path)}`);
    }, {primary: true, confirm: overwrite ? "Delete the finished run, and train again?" : ""});
    button.querySelector("button").disabled = isBlocked;
    replace(start, button);
  }

  function download(missing) {
    const said = el("div", {role: "status"});
    return el("div", {class: "panel"}, el("h3", {}, "A model is not on this machine"), missing.map((name) => el("p", {class: "mono wrap"}, name)),
      action("What would be fetched?", async () => {
        const offers = [];
        for (const name of missing) offers.push(await post("train/offer", {name}));
        replace(said, offers.map((offer) => el("p", {class: "wrap"}, offer.describe)), el("label", {class: "choice"}, el("input", {type: "checkbox", onchange: (event) => { agreed = event.target.checked; drawStart(); }}), " Fetch it when the run starts"));
      }), said, el("p", {class: "small quiet"}, "Without a network: fetch it on another machine with `gym models pull`, copy the folder here, and give its path as model."));
  }

  // The estimate for the newest valid text; for a model on the Hub only on request, since its config is read from there.
  let planned = "", planning = false, timer = 0;
  leave(() => { clearTimeout(timer); planning = true; });

  function drawEstimate() {
    if (planned === text.value || planning || checkedText !== text.value) return;
    clearTimeout(timer);
    if (checked.missing.length) { planned = ""; replace(estimate, action("Estimate time and memory", plan)); return; }
    wait();
    timer = setTimeout(() => checkedText === text.value && plan().catch((error) => replace(estimate, el("span", {class: "quiet small wrap"}, `No estimate: ${message(error)}`))), 400);
  }

  let wasInLength = false; // the focus, to which it returns with the control
  function wait() {
    wasInLength ||= document.activeElement?.id === "run-length";
    if (!estimate.querySelector(".state > .pulse")) replace(estimate, loading(READING, null));
  }

  async function plan() {
    const asked = text.value;
    planning = true;
    wait();
    try {
      for (const timed of [false, true]) {
        const found = await post("train/plan", {text: asked, timed});
        if (found.waiting) { timer = setTimeout(() => drawEstimate(), 1500); return; }
        if (asked !== text.value) return;
        showPlan(found, timed);
      }
      planned = asked;
    } catch (error) {
      planned = asked;
      throw error;
    } finally {
      planning = false;
      if (asked !== text.value && checked && !checked.problems.length) drawEstimate();
    }
  }

  // The memory is known first; the time of a step is measured on this machine, which takes longer.
  function showPlan(found, timed) {
    const time = found.steps && found.seconds_per_step ? `about ${duration(found.steps * found.seconds_per_step)}, ` : timed && "time not known, ";
    replace(estimate, el("div", {class: "stack"}, el("p", {}, time, bytes(found.peak_bytes), found.available_bytes && ` of ${bytes(found.available_bytes)}`), el("p", {}, fit(found) || state("hollow", `this machine has no ${found.device}`)),
      !timed && loading("Timing a step on this machine", null), lengthChoice(found), found.seconds_per_step && el("p", {class: "small quiet"}, "Loading, and measuring before and after training, take additional time."),
      el("details", {}, el("summary", {class: "small"}, "How it is made up"), facts([
        ["Steps", found.steps ? number(found.steps) : "determined by the rows"],
        ["Time per step", found.seconds_per_step ? `${found.seconds_per_step.toFixed(2)} s` : "not known"],
        ...checked.chosen.map((one) => [one.key, el("span", {title: one.reason}, String(found.by_rows?.[one.key] ?? one.value))]),
        ["Weights", `${number(found.weights)}, of which ${number(found.trained)} are trained`], ["Device", found.device],
        ...Object.entries(found.memory || {}).filter(([, value]) => value).map(([key, value]) => [key.replaceAll("_", " "), bytes(value)])]))));
    if (timed && wasInLength) document.getElementById("run-length")?.focus();
    wasInLength &&= !timed;
  }

  // A long run can be limited to a time; the choice is kept when the shorter run is planned.
  let wasLong = false;
  function lengthChoice({steps, seconds_per_step: each}) {
    const given = checked.given.max_steps ?? null, total = steps && each ? steps * each : 0;
    wasLong ||= total >= LONG_SECONDS;
    if (!wasLong || !total || !mayChange()) return null;
    const caps = CAPS.map(([seconds, words]) => [Math.floor(seconds / each), words]).filter(([most]) => most > 0 && (given !== null || most < steps));
    const control = el("select", {id: "run-length", onchange: () => set({max_steps: control.value ? Number(control.value) : null}).catch((error) => say(message(error)))},
      el("option", {value: ""}, given === null ? `all rows: ${duration(total)}` : "all rows"), given !== null && !caps.some(([most]) => most === given) && el("option", {value: given, selected: true}, `${count(given, "step")}: ${duration(total)}`),
      caps.map(([most, words]) => el("option", {value: most, selected: most === given}, `at most ${words}: ${count(most, "step")}`)));
    return el("div", {class: "field"}, el("label", {for: "run-length"}, "Length"), control);
  }

  if (!mayChange()) { replace(yaml.problems, el("p", {class: "quiet"}, "Only operators can start training.")); choices.draw({given: {}, problems: [], chosen: []}); }
  if (query.get("data")) {
    const draft = localStorage.getItem(DRAFT), columns = namedColumns(query.get("columns") || ""), format = query.get("format") || "auto";
    const rows = {path: query.get("data"), ...(format !== "auto" && {format}), ...(Object.keys(columns).length && {columns})};
    remember({data: "", columns: "", format: ""});
    if (!draft || draft === FIRST || window.confirm("Replace the rows in your draft?")) await set({data: [rows]});
  } else if (query.get("recipe") && recipes.some((one) => one.name === query.get("recipe"))) { localStorage.removeItem(DRAFT); await begin(query.get("recipe")); }
}

// Whether the run fits, as a shape and a word; null if the memory of the device is unknown.
function fit({peak_bytes, available_bytes}) {
  if (!available_bytes) return null;
  const share = peak_bytes / available_bytes;
  return share < 0.85 ? state("filled", "It fits") : share < 1 ? state("half", "It fits barely") : state("struck", "It does not fit");
}
