// A run: its live curves, other runs for comparison and how their configs differ, and buttons to stop and resume it.
import {action, ago, api, bytes, copyable, count, duration, el, empty, facts, figure, leave, loading, mayChange, navigate, number, on, post, progress, replace, say, section, table} from "../static/app.js";
import {between, chart, smoothed} from "../static/charts.js";
import {jobPanel, runLink, runState} from "./jobs.js";
import {outcome} from "./run_outcome.js";

export const title = "Run";

// The charts of every run, in this order; each draws the metrics that the run has.
const CHARTS = [
  {title: "Loss", keys: ["loss", "eval_loss"], wide: true, log: true},
  {title: "Reward", keys: ["reward", "eval_reward"]},
  {title: "Gradient norm", keys: ["grad_norm"], log: true},
  {title: "Learning rate", keys: ["learning_rate"]},
  {title: "Tokens per second", keys: ["performance/tokens_per_second"]},
  {title: "Peak memory, GB", keys: ["performance/peak_ram_bytes", "performance/peak_cuda_bytes"], scale: 1e-9, names: ["RAM", "GPU"]},
  {title: "GPU use, %", keys: ["performance/gpu_utilization_percent"]},
];
const ELAPSED = "performance/elapsed_seconds";
const SHOWN = new Set([...CHARTS.flatMap((one) => one.keys), ELAPSED]);
// The choices for the x axis: the series that maps steps to it, and the format of its values.
const AXES = {step: {label: "step"}, tokens: {label: "tokens", key: "num_tokens", text: (value) => (value >= 1e6 ? `${number(value / 1e6, 3)}M` : number(Math.round(value)))}, time: {label: "time", key: ELAPSED, text: duration}};
const MOST_COMPARED = 5;
const MOST_POINTS = 6000;

export async function show(root, {path}, query) {
  const view = {smoothing: Number(query.get("smoothing")) || 0, log: query.get("log") === "1", x: AXES[query.get("x")] ? query.get("x") : "step", low: limit(query.get("xmin")), high: limit(query.get("xmax")), others: query.getAll("with").slice(0, MOST_COMPARED), more: false};
  let run = null, charts = [], waitingFor = null;
  const state = el("div", {class: "row", role: "status"}), buttons = el("div", {class: "row"}), top = el("div"), controls = el("div", {class: "controls", role: "group", "aria-label": "Curves"});
  const plots = el("div", {class: "plots"}), rest = el("details", {ontoggle: () => { view.more = rest.open; drawRest(); }}), below = el("div", {class: "below"}), jobs = el("div");
  const changed = el("span");
  document.title = `${path} · Runs`;
  replace(root, loading());

  const restore = () => {
    const wanted = new URLSearchParams();
    if (view.low !== null) { wanted.set("xmin", view.low); wanted.set("xmax", view.high); }
    if (view.smoothing) wanted.set("smoothing", view.smoothing);
    if (view.log) wanted.set("log", "1");
    if (view.x !== "step") wanted.set("x", view.x);
    for (const other of view.others) wanted.append("with", other);
    history.replaceState({}, "", `${location.pathname}${wanted.size ? `?${wanted}` : ""}`);
  };

  const url = (more = {}) => {
    const wanted = new URLSearchParams(more);
    for (const other of view.others) wanted.append("with", other);
    return `${runLink(path).slice(1)}?${wanted}`;
  };

  async function load() {
    const range = view.low !== null && view.x === "step" ? {xmin: view.low, xmax: view.high} : {};
    run = await api(url(range));
    if (run.status === "waiting") { drawWaiting(); return; }
    waitingFor = null;
    draw();
  }

  const all = () => [run, ...run.others];
  const label = (one) => short(one.path, all());

  function drawWaiting() {
    if (waitingFor === run.job.id) return;
    waitingFor = run.job.id;
    replace(root, header(run), el("p", {class: "quiet"}, run.job.status === "running" ? "Loading the model and the rows. Curves appear with the first figures." : "It ended before its first step."),
      jobPanel(run.job.id, {after: () => setTimeout(load, 300)}),
      el("p", {}, el("a", {href: "/train"}, "Back to training")));
    const timer = setInterval(() => { if (waitingFor) load().catch(() => {}); else clearInterval(timer); }, 1500);
    leave(() => { waitingFor = null; clearInterval(timer); });
  }

  const header = (one) => el("header", {}, el("div", {class: "heading"}, el("p", {class: "crumb"}, el("a", {href: "/runs"}, "Runs")), el("h1", {}, one.path.replace(/^@\//, "/"))), el("div", {class: "row"}, state, buttons));

  function draw() {
    charts = [];
    replace(root, header(run), top, run.status === "finished" && outcome(run), controls, plots, rest, jobs, below);
    drawTop();
    drawControls();
    drawPlots();
    drawBelow();
    drawJob();
  }

  let jobShown = "";
  function drawJob() {
    if (!run.job || jobShown === run.job.id) return;
    jobShown = run.job.id;
    const holder = el("div"), id = run.job.id;
    const opened = run.job.status === "running" ? null : run.job.exit_code ? true : null;
    replace(jobs, el("details", {open: opened, ontoggle: (event) => { if (event.target.open && !holder.firstChild) holder.append(jobPanel(id)); }}, el("summary", {}, "Output of the process"), holder));
  }

  function drawTop() {
    const {figures} = run, total = totalSteps(), isRunning = ["running", "running?", "starting", "stopping"].includes(run.status);
    replace(state, runState(run.status));
    replace(buttons, mayChange() && isRunning && action(run.status === "stopping" ? "End now" : "Stop", stop, {confirm: run.status === "stopping" ? "End it now? Unsaved progress will be lost." : ""}), mayChange() && run.status === "unfinished" && action("Resume", resume, {primary: true}),
      mayChange() && !isRunning && run.config && el("button", {type: "button", onclick: again}, "Train again…"));
    const speed = figures["performance/tokens_per_second"], memory = Math.max(...Object.entries(figures).filter(([key]) => /^performance\/peak_.*bytes$/.test(key)).map(([, one]) => one), 0);
    const left = ["running", "running?"].includes(run.status) && total && run.steps < total ? timeLeft(total) : "";
    replace(top, run.why && el("p", {class: "problem", role: "alert"}, run.why), el("div", {class: "figures"},
      figure("Step", total ? `${number(run.steps)} / ${number(total)}` : number(run.steps), left),
      figure("Loss", shown(figures.loss)),
      figures.eval_loss !== undefined && figure("Eval loss", shown(figures.eval_loss), figures.best_step ? `best at step ${number(figures.best_step)}` : ""),
      figures.reward !== undefined && figure("Reward", shown(figures.reward)),
      figures.epsilon !== undefined && figure("Epsilon", shown(figures.epsilon), "privacy spent"),
      figures.num_tokens > 0 && figure("Tokens", number(figures.num_tokens), "trained on"),
      speed && figure("Tokens per second", number(Math.round(speed))),
      memory > 0 && figure("Peak memory", bytes(memory)),
      figure("Changed", changed)), rowsLine(run.rows), total && isRunning ? progress(run.steps, total, "Steps") : null, isRunning && phaseLine(total));
    showAge();
  }

  function showAge() { if (run?.changed) changed.textContent = ago(run.changed); }

  // What the run is doing before its first step and after its last; in between, the metrics show it.
  function phaseLine(total) {
    const isStep = !run.phase || run.phase.startsWith("step "), isDone = total && run.steps >= total;
    return (!isStep || isDone) && el("p", {class: "small quiet wrap"}, isStep ? "All steps are done. The model is being evaluated and saved." : run.phase);
  }

  // The counts of rows, since a run that trains on half of them looks like any other.
  function rowsLine(rows) {
    if (!rows || !rows.rows || !(rows.dropped || rows.cut)) return null;
    const parts = [`${number(rows.learned)} of ${count(rows.rows, "row is", "rows are")} trained on`, rows.dropped && `${number(rows.dropped)} dropped`, rows.cut && `${number(rows.cut)} cut at max_length`,
      rows.tokens_cut > 0 && `${Math.round((100 * rows.tokens_cut) / (rows.tokens + rows.tokens_cut))}% of the tokens to learn are cut off`].filter(Boolean);
    return el("p", {class: "small quiet"}, `${parts.join("; ")}.`);
  }

  // The total steps of the run: as configured, or estimated from the share of finished epochs.
  function totalSteps() {
    const [step, epoch] = run.series.epoch?.at(-1) || [0, 0];
    return run.total_steps || (epoch > 0 && run.settings.num_train_epochs ? Math.round((step / epoch) * run.settings.num_train_epochs) : null);
  }

  function timeLeft(total) {
    const points = run.series[ELAPSED] || [], [end, now] = points.at(-1) || [], [begin, then] = points.at(-6) || points[0] || [];
    return end > begin ? `${duration(((total - run.steps) * (now - then)) / (end - begin))} left` : "";
  }

  const interval = () => run.settings.logging_steps || Math.min(10, Math.max(1, Math.floor((totalSteps() || 0) / 100)));

  function again() {
    const name = path.replace(/-\d+$/, ""), number = Number(/-(\d+)$/.exec(path)?.[1] || 1) + 1;
    const before = localStorage.getItem("gym.train.draft");
    if (before && before !== run.config && !window.confirm("Replace your draft in Train?")) return;
    localStorage.setItem("gym.train.draft", run.config.replace(/^output_dir:.*$/m, (line) => line.replace(path, `${name}-${number}`)));
    navigate("/train");
  }

  async function stop() { await post(`${runLink(path).slice(1)}/stop`); say("It stops after this step, with a checkpoint."); setTimeout(load, 300); }
  async function resume() { await post(`${runLink(path).slice(1)}/resume`); say("Resuming from the last checkpoint."); jobShown = ""; setTimeout(load, 1000); }

  function drawControls() {
    const smoothing = el("input", {id: "smoothing", type: "range", min: 0, max: 0.99, step: 0.01, value: view.smoothing, oninput: (event) => { view.smoothing = Number(event.target.value); share.textContent = view.smoothing.toFixed(2); restore(); fill(); }});
    const share = el("output", {for: "smoothing", class: "number"}, view.smoothing.toFixed(2));
    const log = el("button", {type: "button", "aria-pressed": String(view.log), onclick: () => { view.log = !view.log; restore(); drawControls(); drawPlots(); }}, "Log scale");
    const textOf = AXES[view.x].text || ((value) => number(Math.round(value)));
    const zoom = view.low !== null && el("button", {type: "button", onclick: () => zoomTo(null, null)}, `${AXES[view.x].label} ${textOf(view.low)} to ${textOf(view.high)}: show all`);
    const across = el("select", {id: "across", onchange: () => { Object.assign(view, {x: across.value, low: null, high: null}); restore(); load().catch((error) => say(error.message)); }}, Object.entries(AXES).map(([name, {label}]) => el("option", {value: name, selected: name === view.x}, label)));
    const others = el("select", {"aria-label": "Overlay another run", onchange: (event) => { if (event.target.value) overlay([...view.others, event.target.value]); }}, el("option", {value: ""}, "Compare with…"));
    const fillOthers = async () => {
      if (others.children.length > 1) return;
      const {runs} = await api("runs");
      others.append(...runs.filter((one) => one.path !== path && one.status !== "unreadable" && !view.others.includes(one.path)).map((one) => el("option", {value: one.path}, one.path)));
    };
    others.addEventListener("pointerdown", fillOthers);
    others.addEventListener("focus", fillOthers);
    replace(controls, el("div", {class: "row"}, el("label", {for: "smoothing"}, "Smoothing"), smoothing, share), el("div", {class: "row"}, el("label", {for: "across"}, "Across"), across), log, view.others.length < MOST_COMPARED && others,
      view.others.map((other) => el("button", {type: "button", class: "chip", "aria-label": `Remove ${other}`, onclick: () => overlay(view.others.filter((one) => one !== other))}, other, el("span", {"aria-hidden": "true"}, " ×"))), zoom);
  }

  function overlay(others) { view.others = others.slice(0, MOST_COMPARED); restore(); load().catch((error) => say(error.message)); }

  async function zoomTo(low, high) {
    view.low = low;
    view.high = high;
    restore();
    if (view.x === "step" && (low === null || all().some((one) => one.is_thinned))) run = await api(url(low === null ? {} : {xmin: low, xmax: high}));
    for (const {plot} of charts) plot.zoom(low, high);
    fill();
    drawControls();
  }

  // With several runs, a chart has one metric and dashes distinguish runs; with one run, dashes distinguish metrics.
  function specs() {
    const several = run.others.length > 0;
    const wanted = CHARTS.flatMap((one) => (several ? one.keys.map((key, at) => ({...one, title: at ? heading(key) : one.title, keys: [key], wide: false})) : [one]));
    return wanted.filter((one) => one.keys.some((key) => all().some((each) => each.series[key]?.length)));
  }

  function make(spec) {
    const {label, text} = AXES[view.x];
    const plot = chart({title: spec.title, xLabel: label, ...(text && {xText: text}), group: "run", height: spec.wide ? 280 : 220, log: view.log && spec.log !== false, onZoom: (low, high) => (low === null ? zoomTo(null, null) : zoomTo(Math.max(0, Math.floor(low)), Math.ceil(high))), none: label === "step" ? undefined : `No values by ${label}: this run did not record them.`, range: view.low === null ? null : [view.low, view.high]});
    if (spec.wide) plot.node.classList.add("wide");
    return {spec, plot};
  }

  function drawPlots() {
    const wanted = specs();
    charts = wanted.map(make);
    replace(plots, wanted.length ? charts.map(({plot}) => plot.node) : empty(["running", "running?", "starting"].includes(run.status)
      ? `The first point comes with step 1, after the model and the rows are loaded and the model is measured; then one ${interval() === 1 ? "every step" : `every ${count(interval(), "step")}`}.` : "It ended before its first step, so there are no points."));
    drawRest();
    fill();
  }

  function drawRest() {
    const keys = [...new Set(all().flatMap((one) => Object.keys(one.series)))].filter((key) => !SHOWN.has(key)).sort();
    rest.hidden = !keys.length;
    charts = charts.filter((one) => !one.spec.isRest);
    if (!rest.firstChild) rest.append(el("summary"), el("div", {class: "plots"}));
    rest.firstChild.textContent = count(keys.length, "further figure");
    const made = view.more ? keys.map((key) => make({title: heading(key), keys: [key], isRest: true, log: true})) : [];
    charts.push(...made);
    replace(rest.lastChild, made.map(({plot}) => plot.node));
    if (made.length) fill(made);
  }

  function fill(some = charts) {
    const several = run.others.length > 0;
    const marks = several ? [] : run.marks.filter((mark) => Number.isInteger(mark.step)).map((mark) => ({x: mark.step, text: mark.kind === "rollback" ? `back to ${mark.to_step}` : "spike"}));
    for (const {spec, plot} of some) {
      const series = all().flatMap((one) => spec.keys.filter((key) => one.series[key]?.length).map((key) => ({name: several ? label(one) : spec.names?.[spec.keys.indexOf(key)] || (spec.keys.length > 1 ? heading(key) : spec.title), ...drawn(one, key, spec.scale || 1, several)})));
      plot.set(series, {lines: spec.wide || spec.keys.includes("grad_norm") ? marks.map(({x, text}) => ({x: placing(run)(x), text})) : []});
    }
  }

  // For one run, the raw values are drawn behind the smoothed line; those of several runs would hide each other.
  const drawn = (one, key, scale, several) => {
    const known = one.series[key].filter(([, value]) => value !== null);
    const place = placing(one), scaled = known.map(([x, value]) => [place(x), value * scale]).filter(([x]) => x !== null);
    return {points: smoothed(scaled, view.smoothing), raw: view.smoothing && !several ? scaled : null};
  };

  // The position of a step on the axis; null for a run that does not record it.
  function placing(one) {
    const places = (one.series[AXES[view.x].key] || []).filter(([, value]) => value !== null);
    return (stepped) => (view.x === "step" ? stepped : between(places, stepped));
  }

  function drawBelow() {
    const parts = [];
    if (run.others.length) parts.push(differences());
    if (run.marks.length) {
      parts.push(section("Spikes and roll-backs", table([
        {name: "Step", number: true, of: (mark) => number(mark.step)}, {name: "What", of: (mark) => (mark.kind === "rollback" ? `went back to step ${mark.to_step}` : "spike, only recorded")},
        {name: "Figure", of: (mark) => mark.metric}, {name: "Value", number: true, of: (mark) => shown(Number(mark.value))}, {name: "Usual", number: true, of: (mark) => shown(mark.usual)},
      ], run.marks, {label: "Spikes and roll-backs"})));
    }
    if (run.command) parts.push(section(run.status === "finished" ? "Command" : "On the command line", copyable(run.command)));
    parts.push(settings());
    const where = run.environment?.environment;
    if (where) {
      parts.push(section("Where it ran", facts([["Machine", [where.cpu, ...(where.gpus || [])].join(", ")], ["Platform", where.platform], ["Python", where.python], ["Threads", where.threads],
        where.git && ["Commit", `${where.git.commit}${where.git.dirty ? " with changes" : ""}`], ["Config", where.config_sha256], ["Rows", where.data_sha256]]),
      el("details", {}, el("summary", {}, "Packages"), facts(Object.entries(where.packages || {})))));
    }
    replace(below, parts);
  }

  function settings() {
    const keys = Object.keys(run.settings).filter((key) => run.settings[key] !== null && !(Array.isArray(run.settings[key]) && !run.settings[key].length));
    const shownKeys = el("div"), search = el("input", {type: "search", placeholder: "Find a setting", "aria-label": "Find a setting", oninput: () => drawKeys()});
    const drawKeys = () => replace(shownKeys, facts(keys.filter((key) => key.includes(search.value.trim())).map((key) => [key, el("span", {class: "mono"}, written(run.settings[key]))])));
    drawKeys();
    return section("Settings", el("details", {}, el("summary", {}, `All ${keys.length}`), el("div", {class: "settings"}, search, shownKeys)));
  }

  function differences() {
    const every = all(), keys = [...new Set(every.flatMap((one) => Object.keys(one.settings)))].filter((key) => key !== "output_dir");
    const differing = keys.filter((key) => new Set(every.map((one) => JSON.stringify(one.settings[key] ?? null))).size > 1);
    const columns = [{name: "Setting", of: (key) => el("span", {class: "mono"}, key)}, ...every.map((one) => ({name: label(one), class: "mono", of: (key) => written(one.settings[key])}))];
    const figures = ["loss", "final_loss", "eval_loss", "reward", "performance/tokens_per_second"].filter((key) => every.some((one) => typeof one.figures[key] === "number"));
    const last = table([{name: "Last figure", of: heading}, ...every.map((one) => ({name: label(one), number: true, of: (key) => shown(one.figures[key])}))], figures, {label: "Last figures"});
    return section("Settings that differ", differing.length ? el("div", {class: "differences"}, table(columns, differing, {label: "Settings that differ"})) : el("p", {class: "quiet"}, "The settings are the same."), last);
  }

  on("run", (news) => {
    if (!run || !run.series) return;
    if (news.path === path && run.status === "waiting") { load(); return; }
    const one = all().find((each) => each.path === news.path);
    if (!one) return;
    if (news.since === null) { load(); return; }
    const before = one.status;
    Object.assign(one, {status: news.status, phase: news.phase, steps: news.steps, figures: news.figures, marks: news.marks, changed: Date.now() / 1000});
    let isNew = false, size = 0;
    for (const [key, points] of Object.entries(news.series)) {
      if (!one.series[key]) isNew = true;
      one.series[key] = [...(one.series[key] || []).filter(([step]) => step < news.since), ...points];
      size = Math.max(size, one.series[key].length);
    }
    if (before !== news.status || size > MOST_POINTS) { load(); return; }
    if (one === run) drawTop();
    if (isNew) drawPlots(); else fill();
  });
  on("resumed", load);
  on("job", (job) => { if (run && job.folder === (run.folder || run.job?.folder)) load().catch(() => {}); });
  const reread = setInterval(() => { if (run?.series && !document.hidden && run.status !== "waiting") api(url({since: run.steps || 0})).catch(() => {}); }, 300000);
  const aging = setInterval(showAge, 5000);
  leave(() => { clearInterval(reread); clearInterval(aging); });
  await load();
}

const limit = (text) => (text !== null && text !== "" && Number.isFinite(Number(text)) ? Number(text) : null);
const shown = (value) => (typeof value === "number" ? number(value, 4) : null);
const written = (value) => (value === null || value === undefined ? null : typeof value === "string" ? value : JSON.stringify(value, (_, one) => (isEmpty(one) ? undefined : one), 1)?.replaceAll(/\n\s*/g, " ") ?? "[]");
const isEmpty = (value) => value === null || (typeof value === "object" && !Object.keys(value).length);
const heading = (key) => { const text = key.replace("performance/", "").replaceAll("_", " "); return text.charAt(0).toUpperCase() + text.slice(1); };

// The shortest unique end of a path.
function short(path, every) {
  const parts = path.split("/");
  for (let from = parts.length - 1; from > 0; from--) {
    const end = parts.slice(from).join("/");
    if (every.filter((one) => one.path === end || one.path.endsWith(`/${end}`)).length === 1) return end;
  }
  return path;
}
