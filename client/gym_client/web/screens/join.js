// Contribute to a hub: an invite, its terms as gym-client shows them, consent, then live progress, balance and limits.
import {action, ago, api, bytes, commandOf, copyable, count, el, facts, leave, loading, mayChange, message, namedColumns, number, post, progress, replace, say, section, state, table, waited} from "../static/app.js";
import {joinForm} from "./join_form.js";
import {hubsPanel} from "./join_hubs.js";

export const title = "Contribute";

const PHASES = {fetch: "Fetching", base: "Fetching the base model", train: "Training", distill: "Distilling", encode: "Encoding", upload: "Uploading", ledger: "Checking the ledger"};
const QUESTIONS = ["server-key", "local-copy", "base-offer", "offer", "hub-restored"];
const ACCOUNT = ["receipt", "verdict", "balance"]; // what changes the figures of the account
const BALANCE_SECONDS = 30; // between requests of the balance, each of which starts two commands
let invite = ""; // only in this tab's memory: commands and jobs never contain it

export async function show(root) {
  const now = el("div", {class: "below"}), agent = el("div"), hubs = hubsPanel({changed: () => refresh()}), form = el("div"), newsList = el("div"), news = el("details", {hidden: true}, el("summary", {}, "News"), newsList);
  let watched = null, timer = null, gone = false, balanceAt = Date.now();
  leave(() => { gone = true; clearTimeout(timer); });
  replace(root, el("header", {}, el("h1", {}, "Contribute")),
    el("p", {}, "Train a shared model with your own data, on this machine. What leaves it is a compressed, signed update, after you have read and accepted the terms. Your data and your private key never leave."), now, agent, hubs.node, form, news);
  const first = await api("join");
  const link = invite ? "" : first.invite; // the link that opened the page
  replace(form, mayChange() && joinForm(first, {invite: invite || link, isLink: Boolean(link), begin: async (given) => { invite = given.invite || invite; watch(await post("join", given)); }}));
  if (first.job) watch(first.job);
  draw(first);

  function draw(found) {
    hubs.draw(found);
    replace(agent, found.hubs.some((hub) => !hub.left) && agentPanel(found));
  }

  async function refresh() { const found = await api("join"); if (!gone) draw(found); }

  // ---- the job ----

  function watch(job) {
    clearTimeout(timer);
    watched = {job, events: [], offset: 0, rest: ""};
    form.hidden = true;
    replace(now, loading());
    look(watched);
  }

  async function look(mine) {
    if (gone || mine !== watched) return;
    try {
      const job = await api(`jobs/${mine.job.id}`);
      for (;;) {
        const part = await api(`jobs/${mine.job.id}/output?offset=${mine.offset}`);
        mine.offset = part.next;
        const lines = (mine.rest + part.text).split("\n");
        mine.rest = lines.pop();
        for (const line of lines) { const event = parsed(line); if (event) mine.events.push(event); }
        if (!part.text || part.next >= part.size) break;
      }
      if (mine !== watched || gone) return;
      const hasEnded = job.status !== "running" && mine.job.status === "running", isIn = mine.isIn;
      mine.job = job;
      mine.isIn = mine.events.some((event) => event.event === "joined");
      drawNow(mine);
      const isNew = mine.events.findLast((event) => ACCOUNT.includes(event.event))?.at * 1000 > balanceAt && Date.now() - balanceAt > 1000 * BALANCE_SECONDS;
      if (hasEnded || isNew || (mine.isIn && !isIn)) { balanceAt = Date.now(); await refresh(); }
    } catch (error) { if (error.status !== 0) { form.hidden = false; replace(now, el("p", {class: "problem", role: "alert"}, message(error))); return; } }
    if (mine.job.status === "running") timer = setTimeout(() => look(mine), 1000);
  }

  function parsed(line) {
    try {
      const value = JSON.parse(line);
      if (value?.error?.code) return {event: "error", error: value.error};
      return typeof value?.event === "string" ? value : null;
    } catch { return null; }
  }

  function drawNow({job, events}) {
    const last = (kind) => events.findLast((event) => event.event === kind);
    const isRunning = job.status === "running", error = last("error"), done = last("done"), joined = last("joined");
    const question = !isRunning && !joined ? events.findLast((event) => QUESTIONS.includes(event.event)) : !isRunning && error && last("hub-restored");
    const isOpen = question && error && events.indexOf(error) === events.indexOf(question) + 1;
    const sections = [];
    if (isOpen) sections.push(asked(question, job));
    else if (isRunning) sections.push(section("Now", working(job, events, joined)));
    else if (done) sections.push(section("Ended", state("filled", done.finished ? "the hub has finished all its rounds" : "stopped"), el("p", {}, `${count(done.num_submitted, "update was", "updates were")} sent${done.balance === null ? "" : `; the balance is ${count(done.balance, "credit")}`}.`)));
    else if (error?.error.code === "interrupted") sections.push(section("Now", state("hollow", "Stopped"), el("p", {class: "quiet"}, "An unfinished round continues at its last checkpoint.")));
    else if (columnsIn(error) && mayChange()) sections.push(columnsQuestion(job, error));
    else sections.push(section("This did not work", el("div", {role: "alert"}, error ? el("p", {class: "problem"}, message(error.error)) : el("p", {}, `The command ended with code ${job.exit_code}.`)), details(job)));
    news.hidden = isOpen || !(joined || done);
    replace(newsList, newsTable(events));
    form.hidden = isRunning || Boolean(isOpen);
    replace(now, sections);
  }

  // The panel of a question. Its script is loaded only when there is a question.
  function asked(question, job) {
    const box = el("div", {class: "below"}, loading());
    import("./join_questions.js").then(({questionPanel}) => replace(box, questionPanel(question, {job, answer: async (given) => watch(await post("join/answer", {job: job.id, invite, ...given})), decline: () => { watched = null; replace(now); form.hidden = false; }})));
    return box;
  }

  const details = (job) => el("details", {}, el("summary", {}, "The command"), copyable(commandOf(job)));

  // The error for a file with unknown columns suggests the option that reads them.
  function columnsIn(error) {
    const found = /--columns (?:'([^']+)'|(\S+))$/.exec(error?.error.hint || "");
    return found && (found[1] || found[2]);
  }

  function columnsQuestion(job, error) {
    const columns = columnsIn(error), given = (name) => job.command.find((word) => word.startsWith(`--${name}=`))?.slice(name.length + 3) || "";
    return section("Are the columns of your file read right?", el("p", {class: "wrap"}, `${error.error.message}.`),
      facts(Object.entries(namedColumns(columns)).map(([ours, theirs]) => [ours, theirs])),
      el("p", {class: "small quiet"}, "For other columns, see More below."),
      action("Use these columns", async () => watch(await post("join", {server: given("server") || null, invite, data: given("data"), columns, name: given("name"), rounds: given("rounds") ? Number(given("rounds")) : null})), {primary: true}));
  }

  function working(job, events, joined) {
    const at = events.findLast((event) => ["progress", "busy"].includes(event.event)), recent = events.at(-1);
    const isMoving = at?.event === "progress" && at === recent && at.done < at.total, silent = recent?.seconds || 0;
    const about = at?.event === "progress" ? (["fetch", "base", "upload"].includes(at.phase) ? `${bytes(at.done)} of ${bytes(at.total)}` : `${at.done} of ${at.total}`) : "";
    return el("div", {class: "doing"},
      el("div", {class: "spread"}, state("half", joined ? joined.message : job.command.some((word) => word.startsWith("--accept")) ? "joining" : "reading the hub's terms"), stopper(job)),
      isMoving ? el("div", {class: "field", "aria-live": "polite"}, el("span", {}, `${PHASES[at.phase] || at.phase} `, el("span", {class: "quiet"}, about, at.loss !== null && at.loss !== undefined && ` · loss ${number(at.loss)}`), silent > 0 && waited(silent + Date.now() / 1000 - recent.at)), progress(at.done, at.total, PHASES[at.phase] || at.phase))
        : el("p", {class: "quiet", "aria-live": "polite"}, phaseOf(events), waited(silent + Date.now() / 1000 - (recent?.at || job.started_at))),
      details(job));
  }

  // What the agent does between the phases that count: its newest line, in words for people.
  function phaseOf(events) {
    const recent = events.findLast((event) => event.event !== "policy"), sent = events.findLast((event) => ["receipt", "verdict"].includes(event.event));
    if (recent?.message?.startsWith("paused: run")) return "Paused";
    if (recent?.event === "done") return "Ending";
    if (recent?.event === "task") return "Preparing the task";
    if (recent?.event === "waiting" && sent?.event === "receipt" && sent.verdict === "admitted") return "The hub has your update. Its verdict follows when enough others have sent theirs";
    return recent?.message || "Starting";
  }

  const stopper = (job) => mayChange() && action(job.stops ? "End now" : "Stop", async () => {
    watched.job = await post(`jobs/${job.id}/stop`);
    say("Stops at the next checkpoint; continuing resumes from there");
  }, {confirm: job.stops ? "End now? Steps since the last checkpoint are trained again." : ""});

  function newsTable(events) {
    const reported = events.filter((event) => event.message && !["busy", "progress"].includes(event.event)).slice(-30).reverse();
    return table([{name: "When", of: (event) => ago(event.at)}, {name: "What", class: "reason", of: (event) => event.message}], reported, {label: "News", none: "Nothing yet."});
  }

  // ---- the agent of this home, regardless of how it was started ----

  function agentPanel({agent: at, job, last}) {
    const isRunning = job?.status === "running" || at.elsewhere !== null;
    const word = at.is_paused || at.policy_pause ? ["hollow", "Paused"] : isRunning ? ["filled", "May work"] : ["hollow", "Not running"];
    const limits = el("div");
    const open = el("details", {ontoggle: async () => { if (open.open && !limits.firstChild) replace(limits, (await import("./join_limits.js")).limitsForm(at, {saved: refresh})); }},
      el("summary", {}, at.problem ? "Limits" : `Works ${at.hours.length ? at.hours.join(" and ") : "at any time"}${at.on_battery === "train" ? "" : at.on_battery === "pause" ? ", not on battery" : ", ends on battery"}`), limits);
    return section("This machine", el("div", {class: "spread"}, el("span", {}, state(...word), at.elsewhere !== null && el("span", {class: "quiet"}, ` in another program, process ${at.elsewhere}`)),
      mayChange() && el("span", {class: "row"},
        at.is_paused ? action("Resume", async () => { await post("join/resume"); await refresh(); }, {primary: true}) : action("Pause", async () => { await post("join/pause"); say("Pauses at the next checkpoint"); await refresh(); }),
        !isRunning && last.server && action("Continue", async () => watch(await post("join", {})), {primary: !at.is_paused}))), open);
  }
}
