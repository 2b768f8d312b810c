// Contribute to a hub: its terms as gym-client shows them, consent, then live progress, verdicts, receipts and balance.
import {action, ago, api, bytes, commandOf, copyable, count, el, empty, facts, failed, figure, leave, loading, mayChange, message, number, outcome, post, progress, replace, say, section, short, state, table} from "../static/app.js";

export const title = "Join";

const PHASES = {fetch: "Fetching", base: "Fetching the base model", train: "Training", distill: "Distilling", encode: "Encoding", upload: "Uploading", ledger: "Checking the ledger"};
const QUESTIONS = ["server-key", "local-copy", "base-offer", "offer", "hub-restored"];
const RECEIPTS = 200;
let answered = null; // the terms that the last yes was to
let invite = ""; // in this tab's memory alone: commands and jobs never hold it

export async function show(root) {
  const now = el("div", {class: "below"}), hub = el("div", {class: "below"}), form = el("div");
  let watched = null, timer = null, gone = false;
  leave(() => { gone = true; clearTimeout(timer); });
  replace(root, el("header", {}, el("h1", {}, "Join a hub")),
    el("p", {}, "Train a shared model with your own data, on this machine. What leaves it is a compressed, signed update, after you have read and accepted the terms. Your data and your private key never leave."), now, form, hub);
  const found = await api("join");
  drawForm(found);
  if (found.job) watch(found.job); else if (!found.hubs.length) replace(hub);
  await drawHubs(found);

  // ---- the form ----

  function drawForm({last, hubs}) {
    if (!mayChange()) return;
    const field = (id, label, more, help) => {
      const node = el("input", {id, maxlength: 1024, ...more});
      return {node, part: el("div", {class: "field"}, el("label", {for: id}, label), node, help && el("span", {class: "help"}, help))};
    };
    const server = field("server", "Hub", {placeholder: "hub.example.org:9443", value: last.server || "", list: "hubs"}, "host or host:port; an invite may stand for it");
    const token = field("invite", "Invite", {type: "password", autocomplete: "off", value: invite, maxlength: 4096}, "where the hub asks for one; it is not shown or kept");
    const data = field("data", "Data", {placeholder: last.data || "a small example", list: "files"}, "a file below the workbench’s folder; empty: the last one");
    const columns = field("columns", "Columns, ours=theirs", {placeholder: "prompt=question,completion=answer"}, "where a file names them otherwise");
    const name = field("name", "Your name there", {value: last.name || "", maxlength: 64}, "the coordinator sees it; empty: your id");
    const rounds = field("rounds", "Rounds", {type: "number", min: 1, placeholder: "all"}, "leave after so many");
    const files = el("datalist", {id: "files"});
    api("data").then((listed) => replace(files, listed.files.map((one) => el("option", {value: one.name})))).catch(() => {});
    replace(form, section(hubs.length ? "Go on, or join another hub" : "Which hub?", el("form", {class: "doing", onsubmit: (event) => event.preventDefault()},
      el("datalist", {id: "hubs"}, hubs.map((one) => el("option", {value: one.address}))),
      files, el("div", {class: "doing-fields thirds"}, server.part, token.part, data.part, columns.part, name.part, rounds.part),
      action("Look at the terms", async () => {
        invite = token.node.value.trim();
        watch(await post("join", {server: server.node.value.trim() || null, invite, data: data.node.value.trim(), columns: columns.node.value.trim(), name: name.node.value.trim(), rounds: rounds.node.value ? Number(rounds.node.value) : null}));
      }, {primary: true}))));
  }

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
      const hasEnded = job.status !== "running" && mine.job.status === "running";
      mine.job = job;
      drawNow(mine);
      if (hasEnded) { const found = await api("join"); if (!gone) { drawHubs(found); } }
    } catch (error) { if (error.status !== 0) { form.hidden = false; replace(now, failed(error)); return; } }
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
    if (isOpen) sections.push(ask(question, job));
    else if (isRunning) sections.push(section("Now", working(job, events, joined)));
    else if (done) sections.push(section("Ended", state("filled", done.finished ? "the hub has finished all its rounds" : "stopped"), el("p", {}, `${count(done.num_submitted, "update was", "updates were")} sent${done.balance === null ? "" : `; the balance is ${count(done.balance, "credit")}`}.`)));
    else sections.push(section("This did not work", el("div", {role: "alert"}, error ? el("p", {class: "problem"}, message(error.error)) : el("p", {}, `The command ended with code ${job.exit_code}.`)), details(job)));
    if (!isOpen && (joined || done)) sections.push(section("News", news(events)));
    form.hidden = isRunning || Boolean(isOpen);
    replace(now, sections);
  }

  const details = (job) => el("details", {}, el("summary", {}, "The command"), copyable(commandOf(job)));

  function working(job, events, joined) {
    const at = events.findLast((event) => ["progress", "busy"].includes(event.event)), recent = events.at(-1);
    const isMoving = at?.event === "progress" && at === recent && at.done < at.total;
    const about = at?.event === "progress" ? (["fetch", "base", "upload"].includes(at.phase) ? `${bytes(at.done)} of ${bytes(at.total)}` : `${at.done} of ${at.total}`) : "";
    return el("div", {class: "doing"},
      el("div", {class: "spread"}, state("half", joined ? joined.message : "looking at the hub and its terms"), stopper(job)),
      isMoving ? el("div", {class: "field", "aria-live": "polite"}, el("span", {}, `${PHASES[at.phase] || at.phase} `, el("span", {class: "quiet"}, about, at.loss !== null && at.loss !== undefined && ` · loss ${number(at.loss)}`)), progress(at.done, at.total, PHASES[at.phase] || at.phase))
        : el("p", {class: "quiet", "aria-live": "polite"}, recent?.message || "Starting"),
      details(job));
  }

  const stopper = (job) => mayChange() && action(job.stops ? "End now" : "Stop", async () => {
    watched.job = await post(`jobs/${job.id}/stop`);
    say("It stops at the next checkpoint; joining again resumes");
  }, {confirm: job.stops ? "End it now? What was not saved is trained again." : ""});

  function news(events) {
    const told = events.filter((event) => event.message && !["busy", "progress"].includes(event.event)).slice(-30).reverse();
    return table([{name: "When", of: (event) => ago(event.at)}, {name: "What", class: "reason", of: (event) => event.message}], told, {label: "News", none: "Nothing yet."});
  }

  // ---- questions ----

  function ask(question, job) {
    const before = answered?.event === question.event && answered.job !== job.id && question.lines ? new Set(answered.lines.map(String)) : null;
    const isNew = (line) => before && !before.has(String(line));
    const yes = (text, given) => mayChange() && el("div", {class: "row"},
      action(text, async () => { answered = {event: question.event, job: job.id, lines: question.lines || []}; watch(await post("join/answer", {job: job.id, invite, ...given})); }, {primary: true}),
      el("button", {type: "button", onclick: () => { watched = null; replace(now); form.hidden = false; }}, "No"));
    const terms = () => [before && el("p", {class: "problem", role: "alert"}, "The terms changed after your answer. What is new stands bold."),
      el("dl", {class: "facts terms"}, merged(question.lines).map(([label, lines]) => el("div", {}, el("dt", {}, label), el("dd", {}, lines.map((line) => el("p", {}, isNew(line) ? el("strong", {}, line[1]) : line[1]))))))];
    switch (question.event) {
      case "server-key": return section("Is this the hub’s key?", el("p", {}, `${question.address} is new here. Compare its key with what the coordinator published. From now on only this key is accepted.`), el("p", {class: "fingerprint"}, question.fingerprint), yes("It is the right key", {fingerprint: question.fingerprint}));
      case "local-copy": return section("Read your copy of the base model?", el("p", {}, `The hub trains ${question.base_model}. Your local copy, if there is one, is read to work out the terms.`), yes("Read it", {accept: question.accept}));
      case "base-offer": return section("Fetch the base model?", terms(), yes("Fetch it", {accept: question.accept}));
      case "hub-restored": return section("The hub was restored from a backup", facts(Object.entries(question).filter(([name]) => !["event", "at"].includes(name)).map(([name, value]) => [name, typeof value === "object" ? JSON.stringify(value) : String(value)])), yes("Go on with it", {accept_restore: true}));
      default: return section(`The terms of ${question.server} at ${question.address}`, terms(), yes("Join on these terms", {accept: question.accept}));
    }
  }

  // Lines without a label belong to the one before, as in the terminal's panel.
  function merged(lines) {
    const found = [];
    for (const line of lines) { if (line[0] || !found.length) found.push([line[0], [line]]); else found.at(-1)[1].push(line); }
    return found;
  }

  // ---- hubs of this home ----

  async function drawHubs({hubs, receipts, num_receipts: total}) {
    replace(hub, hubs.map((one) => drawHub(one)), receipts.length > 0 && section("Receipts", el("p", {class: "quiet"}, `${count(total, "receipt")}, each signed by its hub${total > RECEIPTS ? `; the newest ${RECEIPTS} are shown` : ""}.`), receiptTable(receipts)));
  }

  function drawHub(one) {
    const account = el("div", {}, loading());
    api(`join/account?${new URLSearchParams({server: one.address})}`).then((found) => replace(account,
      el("div", {class: "figures"}, figure("Balance", number(found.balance), "credits"), figure("Round", number(found.server_round), found.round_state), figure("Sent", bytes(found.bytes_up)), figure("Fetched", bytes(found.bytes_down))),
      table([
        {name: "Round", number: true, of: (row) => row.server_round},
        {name: "Verdict", of: (row) => outcome(row.verdict)},
        {name: "Credit", number: true, of: (row) => number(row.credit)},
        {name: "Size", number: true, of: (row) => bytes(row.bytes)},
        {name: "Reason", class: "reason", of: (row) => row.reason},
      ], found.verdicts.slice(0, 100), {label: `Verdicts of ${one.address}`, none: "No verdicts on your updates yet."}))).catch((error) => replace(account, failed(error, () => replace(account.parentElement, drawHub(one).children))));
    return section(one.name || one.address, el("div", {class: "spread"}, el("span", {class: "quiet"}, `${one.address} · you are ${one.contributor}${one.left ? " · left" : ""}`),
      mayChange() && !one.left && action("Leave", async () => { await post("join/leave", {server: one.address}); say(`Leaving ${one.address}`); setTimeout(async () => { if (!gone) drawHubs(await api("join")); }, 8000); }, {confirm: `Leave ${one.name || one.address}? You get no more tasks; what was earned stays in its ledger.`})), account);
  }

  function receiptTable(receipts) {
    return table([
      {name: "Entry", number: true, of: (row) => number(row.sequence)},
      {name: "Round", number: true, of: (row) => number(row.server_round)},
      {name: "What", of: (row) => (row.verdict ? outcome(row.verdict) : row.kind)},
      {name: "Credit", number: true, of: (row) => number(row.credit ?? row.amount)},
      {name: "Update", of: (row) => row.update && short(row.update)},
      {name: "Hub", of: (row) => row.server && short(row.server)},
      {name: "When", number: true, of: (row) => ago(row.at)},
    ], receipts, {label: "Receipts"});
  }
}
