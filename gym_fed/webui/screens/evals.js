// Evaluations: start one, list records with their metrics, compare two of them row by row, and show the leaderboard.
import {action, ago, api, copyable, count, el, failed, leave, loading, mayChange, navigate, number, post, quoted, remember, replace, section, short, signed, state, table} from "../static/app.js";
import {whisker} from "./whisker.js";

export const title = "Evals";

export async function show(root, parameters, query) {
  const folder = query.get("folder") || "evals";
  if (query.get("record")) { await (await import("./record.js")).record(root, folder, query.get("record")); return; }
  const [{suites}, first] = await Promise.all([api("evals/suites"), api(`evals?${new URLSearchParams({folder})}`)]);
  const chosen = [query.get("first"), query.get("second")].filter(Boolean);
  const records = el("div"), compared = el("div"), jobs = el("div", {"aria-live": "polite"}), board = el("div", {}, loading());

  const choose = () => {
    remember({first: chosen[0], second: chosen[1]});
    return compare(compared, folder, chosen);
  };
  const draw = (found) => {
    replace(records, ...recordsOf(found, folder, chosen, choose));
    replace(jobs, ...found.jobs.slice(0, 5).map(jobOf));
    return found.jobs.some((job) => job.status === "running");
  };
  let wanted = true;
  leave(() => { wanted = false; });
  const again = async () => {
    while (wanted) {
      const found = await api(`evals?${new URLSearchParams({folder})}`);
      if (!wanted || !draw(found)) return;
      await new Promise((done) => setTimeout(done, 2000));
    }
  };

  root.append(
    el("header", {}, el("h1", {}, "Evals"), folderForm(folder)),
    section("Evaluate a model", startForm(suites, folder, again), jobs),
    section("Records", records), compared,
    section("Leaderboard", board));
  if (draw(first)) again().catch(() => {});
  await Promise.all([chosen.length === 2 && choose(), showBoard(board)]);
}

function folderForm(folder) {
  const field = el("input", {id: "folder", value: folder});
  return el("form", {class: "row", action: "/evals"}, el("label", {for: "folder"}, "Folder of records"), field,
    el("button", {onclick: (event) => { event.preventDefault(); navigate(`/evals?${new URLSearchParams({folder: field.value})}`); }}, "Open"));
}

function startForm(suites, folder, started) {
  const model = el("input", {id: "model", value: "gym-nano", autocomplete: "off"});
  const own = el("option", {value: ""}, "my own rows");
  const suite = el("select", {id: "suite"}, [own, ...suites.map((one) => el("option", {value: one.name, selected: one.name === "tiny"}, one.name))]);
  const data = el("input", {id: "data", placeholder: "mine.csv", autocomplete: "off"});
  const columns = el("input", {id: "columns", placeholder: "prompt=question,completion=answer", autocomplete: "off"});
  const limit = el("input", {id: "limit", type: "number", min: 1, placeholder: "all"});
  const about = el("p", {class: "quiet small"}), command = el("div");
  const draw = () => {
    const isOwn = suite.value === "";
    about.textContent = isOwn
      ? "Loss, and exact match of short answers; a run, an adapter or a variant is compared with its base. The result is printed by the job."
      : suites.find((one) => one.name === suite.value)?.about || "";
    for (const field of [data, columns]) field.parentElement.hidden = !isOwn;
    const rows = `--data ${quoted(data.value.trim() || "mine.csv")}${columns.value.trim() ? ` --columns ${quoted(columns.value.trim())}` : ""}`;
    const most = limit.value ? ` --limit ${limit.value}` : "";
    const words = isOwn ? `${rows}${most}` : `--suite ${suite.value}${most} --output ${quoted(folder)}`;
    replace(command, copyable(`gym eval ${quoted(model.value.trim() || "gym-nano")} ${words}`));
  };
  for (const field of [model, suite, data, columns, limit]) field.addEventListener("input", draw);
  const begin = action("Evaluate", async () => {
    const rows = suite.value === "" ? {data: data.value.trim() || "mine.csv", columns: columns.value.trim()} : {suite: suite.value};
    await post("evals/start", {model: model.value.trim(), ...rows, folder, ...(limit.value && {limit: Number(limit.value)})});
    started();
  }, {primary: true});
  const fields = [["Model", model], ["Suite", suite], ["File of rows", data], ["Its columns", columns], ["Maximum rows per task", limit]];
  const form = el("form", {class: "fields", onsubmit: (event) => event.preventDefault()},
    ...fields.map(([label, field]) => el("div", {class: "field"}, el("label", {for: field.id}, label), field)), mayChange() && begin);
  draw();
  return el("div", {class: "stack"}, form, about, command);
}

function jobOf(job) {
  const kinds = {running: ["half", "running"], ended: job.exit_code === 0 ? ["filled", "finished"] : ["struck", `failed with ${job.exit_code}`], killed: ["struck", "was killed"]};
  const [shape, text] = kinds[job.status] || ["hollow", job.status];
  const output = el("pre", {class: "raw"}, "");
  const look = async () => { const {text: said} = await api(`jobs/${job.id}/output?offset=-4000`); output.textContent = said || "No output yet."; output.scrollTop = output.scrollHeight; };
  if (job.status === "running") look().catch(() => {});
  return el("details", {open: job.status === "running", ontoggle: (event) => event.target.open && look()},
    el("summary", {}, state(shape, text), ` ${job.title}, `, ago(job.started_at)),
    output, job.status === "running" && mayChange() && action("Stop", () => post(`jobs/${job.id}/stop`)));
}

function recordsOf({records, problems, total}, folder, chosen, choose) {
  const pick = (row) => {
    const box = el("input", {type: "checkbox", checked: chosen.includes(row.id), "aria-label": `Compare ${row.model}`, onchange: () => {
      if (box.checked) { chosen.push(row.id); if (chosen.length > 2) chosen.shift(); } else chosen.splice(chosen.indexOf(row.id), 1);
      document.querySelectorAll("input[data-record]").forEach((one) => { one.checked = chosen.includes(one.dataset.record); });
      choose();
    }, "data-record": row.id});
    return box;
  };
  return [table([
    {name: "Compare", of: pick},
    {name: "Record", of: (row) => el("a", {href: `/evals?${new URLSearchParams({...(folder !== "evals" && {folder}), record: row.id})}`}, short(row.id, 8))},
    {name: "Model", of: (row) => row.model, class: "reason"},
    {name: "Figures", of: (row) => [row.figures.map((one) => el("div", {class: "small nowrap"}, `${one.task} ${one.metric} `, el("strong", {}, one.value.toFixed(4)), el("span", {class: "quiet"}, ` n ${number(one.num_samples)}`))), row.num_figures > row.figures.length && el("div", {class: "small quiet"}, `and ${row.num_figures - row.figures.length} more`)]},
    {name: "Samples", of: (row) => number(row.samples), number: true},
    {name: "At", of: (row) => ago(row.at), number: true},
  ].map((column) => ({...column, of: (row) => { const found = column.of(row); return Array.isArray(found) ? el("div", {}, found) : found; }})), records, {label: "Records", none: "No evaluation has been recorded in this folder. Start one above."}),
  problems.map((problem) => el("p", {class: "problem"}, `Left out: ${problem}`)),
  total > records.length && el("p", {class: "quiet"}, `The newest ${number(records.length)} of ${count(total, "record")}.`),
  records.length > 1 && el("p", {class: "quiet small"}, "Choose two records to compare them row by row.")].flat().filter(Boolean);
}

async function compare(holder, folder, chosen) {
  if (chosen.length !== 2) { replace(holder); return; }
  replace(holder, loading());
  let found;
  try { found = await api(`evals/compare?${new URLSearchParams({folder, first: chosen[0], second: chosen[1]})}`); } catch (error) { replace(holder, failed(error)); return; }
  const rows = found.tasks.flatMap((task) => Object.entries(task.metrics).map(([metric, difference]) => ({task, metric, ...difference, up: task.higher_is_better[metric]})));
  const reach = Math.max(...rows.flatMap((row) => [Math.abs(row.lower), Math.abs(row.upper)]), 1e-9);
  replace(holder, section("First minus second, row by row",
    el("p", {}, el("span", {class: "quiet"}, "First "), found.first, el("span", {class: "quiet"}, ", second "), found.second, `. Intervals are of ${Math.round(100 * found.confidence)}%; an interval without 0 shows a difference.`),
    table([
      {name: "Task", of: (row) => row.task.task, class: "reason"},
      {name: "Metric", of: (row) => (row.up ? row.metric : `${row.metric}, lower is better`)},
      {name: "n", of: (row) => number(row.num_samples), number: true},
      {name: "First", of: (row) => row.task.first[row.metric].toFixed(4), number: true},
      {name: "Second", of: (row) => row.task.second[row.metric].toFixed(4), number: true},
      {name: "Difference", of: (row) => signed(row.difference), number: true},
      {name: "Interval", of: (row) => whisker(row.difference, row.lower, row.upper, -reach, reach, {zero: true})},
      {name: "", of: (row) => `${signed(row.lower)} to ${signed(row.upper)}`, number: true},
      {name: "p", of: (row) => row.p_value.toFixed(4), number: true},
      {name: "McNemar p", of: (row) => (row.mcnemar_p === null ? null : row.mcnemar_p.toFixed(4)), number: true},
    ], rows, {label: "Comparison", none: "The two records have no task in common."}),
    found.tasks.flatMap((task) => [...task.notes.map((note) => `${task.task}: ${note}`), (task.only_first || task.only_second) && `${task.task}: left out: ${count(task.only_first, "row")} of the first alone and ${task.only_second} of the second alone`]).filter(Boolean).map((note) => el("p", {class: "quiet small"}, note)),
    found.missing.length > 0 && el("p", {class: "quiet small"}, `Only in one of them: ${found.missing.join(", ")}`)));
}

async function showBoard(holder) {
  let found;
  try { found = await api("evals/board"); } catch (error) { replace(holder, failed(error, () => showBoard(holder))); return; }
  if (!found.total) {
    replace(holder, el("div", {class: "state empty"}, el("p", {}, "There is no leaderboard in this folder. To add a record as its first line:"), copyable("gym leaderboard add RECORD --model-name NAME --organization WHO")));
    return;
  }
  const shape = (row) => (row.disputed_by.length ? "struck" : row.reproduced_by.length ? "filled" : "hollow");
  replace(holder, table([
    {name: "Line", of: (row) => row.line, number: true},
    {name: "Model", of: (row) => row.model_name, class: "reason"},
    {name: "Organization", of: (row) => row.organization},
    {name: "Status", of: (row) => state(shape(row), row.status)},
    {name: "Figures", of: (row) => el("div", {}, row.tasks.slice(0, 8).map((task) => el("div", {class: "small nowrap"}, `${task.task} ${task.main_metric} `, el("strong", {}, task.figures[task.main_metric].value.toFixed(4)), el("span", {class: "quiet"}, ` n ${number(task.num_samples)}`))), row.tasks.length > 8 && el("div", {class: "small quiet"}, `and ${row.tasks.length - 8} more`))},
    {name: "Key", of: (row) => short(row.signer, 12)},
    {name: "At", of: (row) => ago(row.at), number: true},
  ], found.submissions, {label: "Leaderboard", none: "The board has no lines yet."}),
  el("p", {class: "quiet small"}, "Self-reported: signed only by the submitter. Others can reproduce a line with gym leaderboard verify."),
  el("p", {class: "quiet small mono wrap"}, `head ${found.head}`));
}
