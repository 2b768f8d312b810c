// Jobs that were started from the pages. Other screens show one with `jobPanel(id)`.
import {action, ago, api, commandOf, copyable, duration, el, empty, facts, leave, loading, mayChange, on, pathUrl, post, replace, short, state, table, when} from "../static/app.js";

export const title = "Jobs";

const SHAPES = {running: "half", ended: "filled", killed: "struck"};

const RUN_SHAPES = {finished: "filled", running: "half", "running?": "half", unfinished: "hollow", unreadable: "struck", waiting: "half", starting: "half", stopping: "half"};
export const runState = (status) => state(RUN_SHAPES[status] || "hollow", status === "unfinished" ? "stopped" : status);
export const runLink = (path) => `/runs/${pathUrl(path)}`;

// A job's status as a shape and a word, with its exit code unless that is 0.
export function jobState(job) {
  if (job.status === "ended" && job.exit_code === 130) return state("hollow", "stopped");
  if (job.status === "ended" && job.exit_code !== 0) return state("struck", job.exit_code < 0 ? `signal ${-job.exit_code}` : `failed, code ${job.exit_code}`);
  return state(SHAPES[job.status] || "hollow", job.status);
}

function stopButton(job, after = () => {}) {
  const text = ["Stop", "End now", "Kill"][Math.min(job.stops, 2)];
  return action(text, async () => after(await post(`jobs/${job.id}/stop`)), {confirm: job.stops ? "End it now? Unsaved progress will be lost." : ""});
}

// A job's command, status and live output; `after(job)` is called when it has ended.
export function jobPanel(id, {after = () => {}} = {}) {
  const head = el("div", {class: "spread"}), text = el("pre", {class: "output", tabindex: "0", role: "log", "aria-label": "Output"}), root = el("div", {class: "job"}, head, text);
  let offset = -32768, timer = null, ended = false, gone = false, wasShown = false;
  const show = (job) => {
    const took = (job.ended_at || Date.now() / 1000) - job.started_at;
    replace(head, el("span", {class: "row"}, jobState(job), el("span", {class: "quiet"}, job.ended_at || job.status === "running" ? duration(took) : "")),
      job.status === "running" && mayChange() && stopButton(job, show));
    if (job.status !== "running" && !ended) { ended = true; after(job); }
  };
  const look = async () => {
    if (wasShown && !root.isConnected) gone = true;
    wasShown = root.isConnected;
    if (gone) return;
    try {
      const job = await api(`jobs/${id}`);
      let part = await api(`jobs/${id}/output?offset=${offset}`);
      const isLow = text.scrollTop + text.clientHeight >= text.scrollHeight - 8;
      while (part.text) {
        text.append(part.text);
        offset = part.next;
        if (offset >= part.size) break;
        part = await api(`jobs/${id}/output?offset=${offset}`);
      }
      if (offset < 0) offset = 0;
      if (isLow) text.scrollTop = text.scrollHeight;
      text.classList.toggle("none", !text.textContent);
      show(job);
    } catch (error) { if (error.status !== 0) { replace(head, error.message); ended = true; } }
    if (!ended && !gone) timer = setTimeout(look, document.hidden ? 5000 : 1500);
  };
  leave(() => { gone = true; clearTimeout(timer); });
  look();
  return root;
}

export async function show(root, {id}) {
  if (id) {
    const job = await api(`jobs/${id}`);
    replace(root, el("header", {}, el("h1", {}, job.title), el("a", {href: "/jobs"}, "All jobs")),
      copyable(commandOf(job)), jobPanel(id), facts([["Began", when(job.started_at)], job.folder && ["Works on", job.folder]]));
    return;
  }
  const list = el("div", {}, loading());
  replace(root, el("header", {}, el("h1", {}, "Jobs")), list);
  const draw = async () => {
    const {jobs} = await api("jobs");
    replace(list, jobs.length ? table([
      {name: "Job", of: (job) => el("a", {href: `/jobs/${job.id}`}, job.title)},
      {name: "Status", of: jobState},
      {name: "Command", class: "mono", of: (job) => short(commandOf(job), 70)},
      {name: "Began", of: (job) => ago(job.started_at), number: true},
    ], jobs, {label: "Jobs"}) : empty("No jobs have been started from these pages yet.", el("a", {class: "button", href: "/train"}, "Train a model")));
  };
  on("job", draw);
  on("resumed", draw);
  await draw();
}
