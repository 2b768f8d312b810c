// The home screen: the round as a ring, contributors at work, the last verdicts, and facts about the hub.
import {api, copyable, count, duration, el, empty, facts, figure, leave, number, on, outcome, replace, section, short} from "../static/app.js";
import {chart} from "../static/charts.js";
import {noLoss, person} from "./parts.js";

export const title = "Hub";
const PHASES = ["open", "collecting", "merging", "committed"];
const MEANING = {
  open: "The round is open; contributors are asked next.",
  collecting: "Contributors train and send their updates.",
  merging: "The updates are judged and merged into one soup.",
  committed: "The soup is the newest version.",
  aborted: "The round ended without a version.",
};
const MOST_VERDICTS = 20;

export async function show(root) {
  const [about, losses] = await Promise.all([api("overview"), api("rounds/losses")]);
  const skew = about.now - Date.now() / 1000;
  const ring = roundRing();
  const numbers = el("div", {class: "figures"});
  const said = el("p", {class: "quiet", role: "status"});
  const left = figure("To the deadline", "–");
  const work = workers(about.is_private), newest = el("span");
  const verdicts = verdictList(about.verdicts);
  const curve = chart({title: "Held-out loss by version", xLabel: "version", height: 240});
  const points = losses.points.map(([height, , after]) => [height, after]);
  let now = about.snapshot;

  function draw(snapshot) {
    now = snapshot;
    ring.set(now, about.num_rounds);
    const {refused} = now.verdicts;
    replace(numbers, left,
      figure("Updates", number(now.num_updates), `quorum ${now.quorum}${refused ? `, ${refused} refused` : ""}`),
      figure("At work", now.num_awaited, `${now.num_tasks} asked`),
      figure("Connected", now.connected, count(now.accounts, "account")),
      figure("Version", now.version, now.version ? "" : "the base model"),
      figure("Held-out loss", number(now.heldout), now.heldout !== null ? "" : about.is_measured ? "not measured yet" : "not measured"));
    replace(said, sentence(now, about));
    replace(newest, short(now.version_digest, 24));
    work.set(now);
    tick();
  }

  function tick() {
    const seconds = now.deadline === null || now.state !== "collecting" ? null : now.deadline - Date.now() / 1000 - skew;
    left.querySelector(".value").textContent = seconds === null ? "–" : duration(seconds);
    ring.time(seconds === null || !now.opened_at ? null : Math.max(0, seconds) / Math.max(1, now.deadline - now.opened_at));
  }

  root.append(
    el("header", {}, el("h1", {}, about.name), el("p", {class: "quiet"}, about.is_running ? "" : "Read-only: this page shows the hub's folder and changes nothing.")),
    el("div", {class: "round"}, ring.node, el("div", {class: "round-side"}, said, numbers)),
    el("div", {class: "columns"},
      section("At work", work.node),
      section("Latest verdicts", verdicts.node)),
    curve.node,
    el("div", {class: "columns"},
      section("This hub", facts([
        ["Model", about.base_model], ["Base digest", short(about.base_digest, 24)], ["Hub", short(about.server)],
        ["Address", about.listen], ["Joining", about.enrolment], ["Training", about.algorithm], ["Merging", about.aggregator], ["Rounds", about.rounds],
        ["Newest version", newest],
      ])),
      section("TLS fingerprint", el("p", {class: "quiet"}, "Contributors compare it with what their invite says."), copyable(about.fingerprint))));
  curve.set([{name: "after the round", points}], {none: noLoss(about.is_measured)});
  draw(about.snapshot);

  on("snapshot", draw);
  on("verdict", verdicts.add);
  on("version", ({body}) => {
    if (body.heldout_after === null || body.heldout_after === undefined || points.some(([height]) => height === body.height)) return;
    if (!points.length && typeof body.heldout_before === "number") points.push([0, body.heldout_before]);
    points.push([body.height, body.heldout_after]);
    curve.set([{name: "after the round", points}]);
  });
  const clock = setInterval(tick, 1000);
  leave(() => clearInterval(clock));
}

function sentence(now, about) {
  if (now.pause && now.state !== "collecting" && now.state !== "merging") return sentenceOf(now.pause);
  if (!now.server_round) return about.is_running ? "No round yet: the first begins when enough contributors are connected." : "No round yet. Start the hub: gym-server run";
  if (now.paused) return `Waiting until ${new Date(now.paused.until * 1000).toLocaleTimeString()}: ${now.paused.reason}`;
  if (now.state === "aborted" && now.reason) return `Aborted: ${now.reason}`;
  if (now.state === "open" && about.is_running && typeof now.connected === "number" && now.connected < now.quorum) return `Waits for contributors: ${number(now.connected)} of the ${number(now.quorum)} that a round needs are connected.`;
  if (now.pause) return `${MEANING[now.state]} ${sentenceOf(now.pause)} No round follows this one until it is resumed.`;
  if (now.merge) return `${MEANING.merging} Now: ${now.merge.phase}${now.merge.total ? `, ${number(now.merge.done)} of ${number(now.merge.total)}` : ""}.`;
  return MEANING[now.state] || "";
}

// Formats a text from the hub as a sentence.
function sentenceOf(text) {
  return `${text[0].toUpperCase()}${text.slice(1)}.`;
}

// Draws four arcs, one per phase: past ones thin, the current one bold, the others faint; the remaining time is inside.
function roundRing() {
  const radius = 84, gap = 5;
  const arcs = PHASES.map((phase, at) => el("path", {d: arc(100, 100, radius, at * 90 + gap, (at + 1) * 90 - gap), fill: "none", class: "arc"}));
  const time = el("circle", {cx: 100, cy: 100, r: 68, fill: "none", class: "left", pathLength: 1, "stroke-dasharray": "0 1", transform: "rotate(-90 100 100)"});
  const big = el("text", {x: 100, y: 104, "text-anchor": "middle", class: "big"});
  const small = el("text", {x: 100, y: 128, "text-anchor": "middle", class: "under"});
  const top = el("text", {x: 100, y: 64, "text-anchor": "middle", class: "under"}, "round");
  const drawing = el("svg", {viewBox: "0 0 200 200", class: "ring", role: "img"}, arcs, time, top, big, small);
  const steps = PHASES.map((phase) => el("li", {}, phase));
  const node = el("div", {class: "round-ring"}, drawing, el("ol", {class: "phases", "aria-label": "Phases of a round"}, steps));
  return {
    node,
    time(share) { time.setAttribute("stroke-dasharray", `${share === null ? 0 : Math.min(1, share)} 1`); },
    set(now, wanted) {
      const at = PHASES.indexOf(now.state);
      drawing.classList.toggle("aborted", now.state === "aborted");
      arcs.forEach((path, place) => path.setAttribute("data-state", place === at ? "now" : place < at ? "past" : "coming"));
      steps.forEach((step, place) => { if (place === at) step.setAttribute("aria-current", "step"); else step.removeAttribute("aria-current"); });
      big.textContent = now.server_round || "–";
      small.textContent = now.state || "not started";
      drawing.setAttribute("aria-label", now.server_round ? `Round ${now.server_round} is ${now.state}; ${count(wanted, "version is", "versions are")} wanted` : "No round yet");
    },
  };
}

function arc(x, y, radius, from, to) {
  const at = (degrees) => { const turn = ((degrees - 90) * Math.PI) / 180; return `${(x + radius * Math.cos(turn)).toFixed(2)} ${(y + radius * Math.sin(turn)).toFixed(2)}`; };
  return `M ${at(from)} A ${radius} ${radius} 0 0 1 ${at(to)}`;
}

// One line per contributor at work, updated in place, since there may be hundreds, four times a second.
function workers(isPrivate) {
  const list = el("ul", {class: "workers", "aria-label": "Contributors at work"});
  const more = el("p", {class: "quiet small"});
  const none = el("div", {});
  const lines = new Map();
  return {
    node: el("div", {class: "scroll-y", tabindex: "0", role: "region", "aria-label": "Contributors at work"}, list, more, none),
    set(now) {
      const wanted = new Set();
      now.tasks.forEach((task, place) => {
        const key = `${task.contributor} ${task.name}`;
        wanted.add(key);
        let line = lines.get(key);
        if (!line) lines.set(key, (line = worker(task)));
        line.set(task);
        if (list.children[place] !== line.node) list.insertBefore(line.node, list.children[place] || null);
      });
      for (const [key, line] of lines) if (!wanted.has(key)) { line.node.remove(); lines.delete(key); }
      more.textContent = now.tasks.length && now.num_tasks > now.tasks.length ? `and ${number(now.num_tasks - now.tasks.length)} more` : "";
      replace(none, now.tasks.length ? null : empty(isPrivate ? "Rounds of this hub are private: who works is not shown." : "Nobody is at work now."));
    },
  };
}

function worker(task) {
  const fill = el("span"), words = el("span", {class: "quiet small what"});
  const bar = el("div", {class: "bar", role: "progressbar", "aria-label": `Progress of ${task.name}`, "aria-valuemin": 0, "aria-valuemax": 100}, fill);
  const node = el("li", {}, el("span", {class: "worker"}, person(task.contributor, task.name)), bar, words);
  let before = "";
  return {
    node,
    set(now) {
      const text = now.outcome || (now.phase ? `${now.phase}${now.total && now.phase !== "fetch" && now.phase !== "upload" ? ` ${now.done}/${now.total}` : ""}` : "not started");
      const share = now.outcome === "replied" ? 100 : now.total ? Math.min(100, Math.round((100 * now.done) / now.total)) : 0;
      if (before === `${text} ${share}`) return;
      before = `${text} ${share}`;
      words.textContent = text;
      fill.style.width = `${share}%`;
      bar.setAttribute("aria-valuenow", share);
      bar.setAttribute("aria-valuetext", text);
      node.dataset.outcome = now.outcome;
    },
  };
}

// Newest first; a ledger entry that arrives twice is shown only once.
function verdictList(entries) {
  const node = el("ol", {class: "verdicts", "aria-live": "polite", "aria-relevant": "additions"});
  const none = empty("No update has been judged yet.");
  const box = el("div", {class: "scroll-y", tabindex: "0", role: "region", "aria-label": "Latest verdicts"}, entries.length ? node : none);
  const had = new Set();
  const line = ({name, body}) => el("li", {}, outcome(body.verdict), el("span", {}, person(body.contributor, name)),
    el("a", {class: "quiet small", href: `/rounds/${body.server_round}`}, `round ${body.server_round}`),
    body.reason && el("p", {class: "quiet small why"}, body.reason));
  for (const entry of entries) { had.add(entry.sequence); node.append(line(entry)); }
  return {
    node: box,
    add(entry) {
      if (had.has(entry.sequence)) return;
      had.add(entry.sequence);
      if (!node.isConnected) replace(box, node);
      node.prepend(line(entry));
      while (node.children.length > MOST_VERDICTS) node.lastElementChild.remove();
    },
  };
}
