// A search: its trials with the best so far, how each setting affects the metric, and its best config.
import {action, api, copyable, el, figure, leave, mayChange, navigate, number, post, replace, section, state, table} from "../static/app.js";
import {chart} from "../static/charts.js";
import {parallel, slices} from "./search_plots.js";
import {runLink} from "./runs.js";
import {shapeOf, valueOf} from "./tune.js";

export async function search(root, path) {
  const load = () => api(`tune/search?${new URLSearchParams({path})}`);
  let found = await load(), wanted = true, shown = "";
  leave(() => { wanted = false; });
  const head = el("header"), figures = el("div", {class: "figures", "aria-live": "polite"}), plots = el("div", {class: "stack"}), trials = el("div"), best = el("div", {class: "stack"}), output = el("div");
  const curve = chart({title: `${found.metric} by trial`, xLabel: "trial", yLabel: found.metric});
  const keys = Object.keys(found.parameters);

  const draw = async () => {
    replace(head, el("div", {}, el("p", {class: "small"}, el("a", {href: "/tune"}, "Tune")), el("h1", {class: "wrap"}, found.path)), el("div", {class: "row"}, shapeOf(found), mayChange() && buttons(found, again)));
    replace(figures, figure("Trials", `${number(found.ended)} of ${number(found.wanted)}`, found.ended - found.complete ? `${found.ended - found.complete} pruned` : ""), figure("Best", found.best ? number(found.best.value, 5) : null, found.metric), figure("Of trial", found.best ? number(found.best.number) : null), figure("Runs now", found.is_running ? found.unfinished.at(-1) || "the next trial" : "nothing"));
    const now = JSON.stringify([found.trials.length, found.unfinished]);
    if (now !== shown) {
      shown = now;
      drawTrials();
    }
    if (found.job && !found.is_running && found.job.exit_code) {
      const {text} = await api(`jobs/${found.job.id}/output?offset=-3000`);
      replace(output, section("Latest output", el("pre", {class: "raw"}, text)));
    } else replace(output);
  };

  function drawTrials() {
    const complete = found.trials.filter((trial) => trial.state === "complete" && typeof trial.value === "number"), sign = found.direction === "maximize" ? -1 : 1;
    const points = complete.map((trial) => [trial.number, trial.value]).sort((a, b) => a[0] - b[0]);
    let least = Infinity;
    const soFar = points.map(([at, value]) => { least = Math.min(least, sign * value); return [at, sign * least]; });
    curve.set([{name: "best so far", points: soFar}, {name: "finished trial", points}]);
    replace(plots, complete.length > 1 && [parallel(keys, complete, found), slices(keys, complete, found)]);
    const rows = [...found.trials.sort((a, b) => a.number - b.number), ...found.unfinished.map((folder) => ({folder, state: found.is_running ? "running" : "interrupted", parameters: {}}))];
    const shapes = {complete: ["filled", "finished"], pruned: ["struck", "pruned"], running: ["half", "running"], interrupted: ["hollow", "interrupted"]};
    replace(trials, table([
      {name: "Trial", of: (trial) => el("a", {href: runLink(`${found.path}/trials/${trial.folder}`)}, trial.number ?? trial.folder), number: true},
      {name: "State", of: (trial) => state(...(shapes[trial.state] || ["hollow", trial.state]))},
      {name: found.metric, of: (trial) => (found.best && trial.number === found.best.number ? el("strong", {}, number(trial.value, 5)) : number(trial.value, 5)), number: true},
      ...keys.map((key) => ({name: key, of: (trial) => (key in trial.parameters ? valueOf(trial.parameters[key]) : null), number: true})),
      {name: "Why", of: (trial) => (found.best && trial.number === found.best.number ? "best" : trial.why), class: "reason"},
    ], rows, {label: "Trials", none: "No trial has started yet."}));
    replace(best, found.best_text ? [el("pre", {class: "raw"}, found.best_text), el("div", {class: "row"}, el("button", {type: "button", onclick: () => {
      if (localStorage.getItem("gym.train.draft") && !window.confirm("Replace your draft there?")) return;
      localStorage.setItem("gym.train.draft", found.best_text);
      navigate("/train");
    }}, "Open in Train"), copyable(`gym train ${found.best_file}`))] : el("p", {class: "state"}, "The first finished trial writes it."));
  }

  async function again() {
    found = await load();
    await draw();
    while (wanted && found.is_running) {
      await new Promise((done) => setTimeout(done, 1500));
      if (!wanted) return;
      found = await load();
      if (wanted) await draw();
    }
  }

  root.append(head, figures, curve.node, plots, section("Trials", trials), section("best.yaml", best), output,
    el("details", {}, el("summary", {}, "What is searched"), el("pre", {class: "raw"}, found.text)));
  await draw();
  if (found.is_running) again().catch(() => {});
}

function buttons(found, again) {
  if (found.is_running) return found.job && found.job.status === "running" ? action("Stop", async () => { await post(`jobs/${found.job.id}/stop`); await again(); }) : el("span", {class: "quiet small"}, "started from a terminal");
  if (found.ended >= found.wanted) return null;
  return action("Resume", async () => { await post("tune/resume", {path: found.path}); await new Promise((done) => setTimeout(done, 800)); await again(); }, {primary: true});
}
