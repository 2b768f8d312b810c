// A record: every task's metrics with their intervals, and the samples that they are computed from.
import {api, copyable, count, duration, el, facts, failed, figure, loading, number, replace, section, state, table} from "../static/app.js";
import {whisker} from "./whisker.js";

const PAGE = 10;

export async function record(root, folder, id) {
  const found = await api(`evals/record?${new URLSearchParams({folder, record: id})}`);
  const rows = found.tasks.flatMap((task) => Object.entries(task.figures).map(([metric, one]) => ({task, metric, ...one})));
  const browser = el("div", {class: "stack"});
  const single = found.tasks.filter((task) => !task.is_group);
  root.append(
    el("header", {}, el("div", {}, el("p", {class: "small"}, el("a", {href: `/evals?${new URLSearchParams({folder})}`}, "Evals")), el("h1", {class: "wrap"}, found.model))),
    el("div", {class: "figures"}, figure("Tasks", number(single.length)), figure("Took", duration(found.seconds)), figure("Record", found.id.slice(0, 8))),
    section("Figures", table([
      {name: "Task", of: (row) => row.task.task, class: "reason"},
      {name: "Metric", of: (row) => (row.higher_is_better ? row.metric : `${row.metric}, lower is better`)},
      {name: "Value", of: (row) => row.value.toFixed(4), number: true},
      {name: "95% interval", of: (row) => row.interval && whisker(row.value, ...row.interval, ...ends(row))},
      {name: "", of: (row) => row.interval && `${row.interval[0].toFixed(4)} to ${row.interval[1].toFixed(4)}`, number: true},
      {name: "n", of: (row) => number(row.num_samples), number: true},
      {name: "Examples in the prompt", of: (row) => number(row.task.num_fewshot), number: true},
    ], rows, {label: "Figures"}), el("p", {class: "quiet small"}, "Intervals of accuracies are Wilson score intervals; others are ±1.96 standard errors.")),
    section("Samples", browser),
    el("details", {}, el("summary", {}, "Evaluation settings"), facts(Object.entries(found.identity).map(([name, value]) => [name, el("span", {class: "mono"}, value)])), copyable(`gym eval show ${found.id} --output ${folder}`)));
  if (single.length) await samples(browser, folder, found.id, single);
}

const ends = (row) => (row.value >= 0 && row.value <= 1 && row.interval[1] <= 1.5 ? [0, 1] : [Math.min(0, row.interval[0]), row.interval[1]]);

async function samples(holder, folder, id, tasks) {
  const task = el("select", {id: "task"}, tasks.map((one) => el("option", {value: one.task}, one.task)));
  const only = el("select", {id: "only"}, [["", "all"], ["right", "right"], ["wrong", "wrong"]].map(([value, text]) => el("option", {value}, text)));
  const words = el("input", {id: "words", type: "search"});
  const list = el("div", {class: "rows"}, loading()), pages = el("nav", {class: "row", "aria-label": "Pages of samples"}), said = el("p", {class: "quiet small", role: "status"});
  let turn = 0;
  const load = async (start) => {
    const mine = ++turn;
    let found;
    try { found = await api(`evals/samples?${new URLSearchParams({folder, record: id, task: task.value, only: only.value, text: words.value, start, limit: PAGE})}`); } catch (error) { replace(list, failed(error, () => load(start))); return; }
    if (mine !== turn) return;
    said.textContent = count(found.total, "sample");
    replace(list, found.samples.length ? found.samples.map(sampleOf) : el("p", {class: "state"}, "No samples match these filters."));
    replace(pages, el("button", {type: "button", disabled: start === 0, onclick: () => load(Math.max(0, start - PAGE))}, "Earlier"), el("button", {type: "button", disabled: start + PAGE >= found.total, onclick: () => load(start + PAGE)}, "Next"));
  };
  for (const field of [task, only]) field.addEventListener("change", () => load(0));
  replace(holder, el("form", {class: "fields", onsubmit: (event) => { event.preventDefault(); load(0); }},
    ...[["Task", task], ["Show", only], ["Words", words]].map(([label, field]) => el("div", {class: "field"}, el("label", {for: field.id}, label), field)), el("button", {}, "Filter")), said, list, pages);
  await load(0);
}

function sampleOf(sample) {
  const turn = (name, ...content) => el("div", {class: "turn"}, el("span", {class: "who"}, name), el("div", {class: "words"}, content));
  return el("article", {class: "datarow", "aria-label": `sample ${sample.number}`},
    el("div", {class: "spread small"}, state(sample.is_right ? "filled" : "hollow", sample.is_right ? "right" : "wrong"), el("span", {class: "quiet"}, `sample ${number(sample.number)}, `, Object.entries(sample.metrics).map(([name, value]) => `${name} ${Number(value.toPrecision(4))}`).join(", "))),
    el("div", {class: "sequence"},
      turn("prompt", sample.prompt_more > 0 && el("span", {class: "quiet"}, `${count(sample.prompt_more, "earlier character")}\n`), el("span", {class: "unlit"}, sample.prompt)),
      sample.answer !== null && turn("answer", sample.answer || "–"),
      sample.choices.length > 0 && turn("choices", sample.choices.map((choice) => el("div", {class: "spread"}, el("span", {class: choice.text.trim() === sample.target.trim() ? "lit" : ""}, choice.text), el("span", {class: "quiet mono"}, choice.logprob.toFixed(3))))),
      turn("target", sample.target)));
}
