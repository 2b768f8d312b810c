// The list of runs, newest first: status, last metrics and a loss sparkline; several runs can be chosen for comparison.
import {action, ago, api, el, empty, leave, loading, mayChange, navigate, number, on, post, remember, replace, table} from "../static/app.js";
import {spark} from "../static/charts.js";
import {jobState, runLink, runState} from "./jobs.js";

export const title = "Runs";

const MOST_COMPARED = 6;

export async function show(root, parameters, query) {
  const chosen = new Set();
  let lines = [], total = 0, place = "", waiting = [];
  const list = el("div", {class: "runs-list"}, loading());
  const compare = el("div", {class: "compare", role: "status"});
  const search = el("input", {type: "search", placeholder: "Find a run", "aria-label": "Search runs", value: query.get("search") || "", oninput: () => { clearTimeout(timer); timer = setTimeout(load, 250); }});
  let timer = null;
  replace(root, el("header", {}, el("h1", {}, "Runs"), el("div", {class: "row"}, search, el("a", {class: "button", href: "/jobs"}, "Jobs"), el("a", {class: "button primary", href: "/train"}, "New run"))), compare, list, mayChange() && elsewhere());

  function elsewhere() {
    const folder = el("input", {id: "run-folder", class: "mono", placeholder: "/path/to/output_dir", maxlength: 1000, spellcheck: "false"});
    return el("details", {}, el("summary", {}, "Add a run from another folder"), el("div", {class: "stack"}, el("p", {class: "small quiet"}, "Runs below this folder of runs, in saves/, and runs that gym train started recently under this account are listed automatically."),
      el("div", {class: "row ends"}, el("div", {class: "field grow"}, el("label", {for: "run-folder"}, "Folder with run.json"), folder), action("Add", async () => { const {path} = await post("runs", {folder: folder.value.trim()}); navigate(runLink(path)); }))));
  }

  const choice = (run) => el("input", {type: "checkbox", "aria-label": `Compare ${run.path}`, checked: chosen.has(run.path), disabled: run.status === "unreadable", onchange: (event) => {
    if (event.target.checked) chosen.add(run.path); else chosen.delete(run.path);
    drawChoice();
  }});

  function drawChoice() {
    const [first, ...others] = [...chosen].slice(0, MOST_COMPARED);
    const text = chosen.size === 1 ? "1 run chosen; choose another to compare" : chosen.size > MOST_COMPARED ? `${chosen.size} runs chosen; the first ${MOST_COMPARED} are compared` : `${chosen.size} runs chosen`;
    replace(compare, chosen.size > 0 && el("div", {class: "spread"}, el("span", {}, text), el("span", {class: "row"},
      el("button", {type: "button", onclick: () => { chosen.clear(); draw(); }}, "Choose none"),
      el("button", {type: "button", class: "primary", disabled: chosen.size < 2, onclick: () => navigate(`${runLink(first)}?${new URLSearchParams(others.map((path) => ["with", path]))}`)}, "Compare"))));
  }

  function draw() {
    drawChoice();
    const begun = waiting.map((job) => ({...job, isJob: true}));
    if (!lines.length && !begun.length) {
      replace(list, search.value ? empty(`No runs match “${search.value}”.`, el("button", {type: "button", onclick: () => { search.value = ""; load(); }}, "Show all"))
        : empty(`No runs in ${place} yet. The first takes about half a minute.`, el("a", {class: "button primary", href: "/train?recipe=nano-sft"}, "Train gym-nano")));
      return;
    }
    replace(list, table([
      {name: el("span", {class: "visually-hidden"}, "Compare"), class: "tick", of: (run) => (run.isJob ? " " : choice(run))},
      {name: "Run", of: (run) => name(run)},
      {name: "Status", of: (run) => (run.isJob ? jobState(run) : runState(run.status))},
      {name: "Loss", number: true, of: (run) => value(run, "loss")},
      {name: "Curve", of: (run) => (run.spark && run.spark.length > 1 ? spark(run.spark) : null)},
      {name: "Eval loss", number: true, of: (run) => value(run, "eval_loss")},
      {name: "Steps", number: true, of: (run) => number(run.steps)},
      {name: "Algorithm", of: (run) => run.algorithm},
      {name: "Model", class: "model", of: (run) => run.model},
      {name: "Changed", number: true, of: (run) => ago(run.changed || run.started_at)},
    ], [...begun, ...lines].sort((one, other) => other.changed - one.changed), {label: "Runs"}), total > lines.length && el("p", {class: "quiet"}, `${number(lines.length)} of ${number(total)} runs; search to see others.`));
  }

  const value = (run, key) => (run.figures && typeof run.figures[key] === "number" ? number(run.figures[key], 4) : null);
  const name = (run) => {
    const path = run.path.replace(/^@\//, "/"), cut = path.lastIndexOf("/") + 1;
    return el("a", {href: runLink(run.path), class: "name", title: run.why || run.path}, cut > 0 && el("span", {class: "quiet"}, path.slice(0, cut)), path.slice(cut));
  };

  async function load() {
    remember({search: search.value});
    const found = await api(`runs?${new URLSearchParams({search: search.value})}`);
    ({runs: lines, total, root: place, waiting} = found);
    draw();
  }

  on("runs", ({changed, gone}) => {
    if (search.value) { load(); return; }
    const known = new Map(lines.map((line) => [line.path, line]));
    total += changed.filter((line) => !known.has(line.path)).length - gone.filter((path) => known.has(path)).length;
    for (const path of gone) known.delete(path);
    for (const line of changed) known.set(line.path, line);
    waiting = waiting.filter((job) => !known.has(job.path));
    lines = [...known.values()].sort((one, other) => other.changed - one.changed);
    const focused = document.activeElement?.getAttribute("aria-label");
    draw();
    if (focused?.startsWith("Compare ")) root.querySelector(`[aria-label="${CSS.escape(focused)}"]`)?.focus();
  });
  on("job", load);
  on("resumed", load);
  const again = setInterval(() => { if (!document.hidden) load(); }, 300000);
  leave(() => { clearInterval(again); clearTimeout(timer); });
  await load();
}
