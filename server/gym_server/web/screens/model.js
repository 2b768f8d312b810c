// The model screen: scores of versions, answers of the newest version, and the chain of digests.
import {action, ago, api, bytes, copyable, count, el, empty, facts, figure, leave, loading, mayChange, message, number, post, remember, replace, section, short, state, streamed, table, waited} from "../static/app.js";
import {chart} from "../static/charts.js";
import {change, helpers, noLoss, pager, refreshOn} from "./parts.js";

export const title = "Model";
const LIMIT = 25, CURVES = 6;

export async function show(root, _, query) {
  let offset = Number(query.get("offset")) || 0, first = 0;
  const figures = el("div", {class: "figures"}), groups = el("p", {class: "sentence"}), chain = el("div", {}, loading()), pages = el("div"), base = el("div"), taken = el("div"), tasks = el("div");
  const newest = newestPanel();
  const losses = chart({title: "Held-out loss by version", xLabel: "version", height: 240});
  const scores = chart({title: "Evaluations by version", xLabel: "version", height: 240});

  async function load() {
    const found = await api(`model?offset=${offset}&limit=${LIMIT}`);
    newest.set(found.newest);
    replace(figures,
      figure("Version", number(found.version), found.base_model),
      figure("Weights", number(found.num_parameters)),
      figure("Fetched to join", bytes(found.soups_bytes), `${count(found.num_soups, "soup")} since the base, and ${bytes(found.round_bytes)} per round`));
    groups.hidden = !found.groups;
    groups.textContent = found.groups ? `${found.groups[0].toUpperCase()}${found.groups.slice(1)}.` : "";
    replace(taken, mayChange() && found.total ? section("As a model folder", el("p", {class: "quiet"}, "Writes the newest version on the hub's machine in Hugging Face format; --version selects another one."),
      copyable(`gym-server model version-${found.version} --version ${found.version} --dir HUB`)) : null);
    replace(base, facts([["Base model", found.base_model], ["Its digest", el("span", {class: "id"}, found.base_digest)]]));
    replace(chain, found.total ? [
      found.chain_is_whole ? el("p", {class: "sentence"}, state("filled", "Each digest follows from its parent and its soup")) : el("p", {class: "problem", role: "alert"}, "A digest does not follow from its parent. Run gym-server ledger verify."),
      table([
        {name: "Version", number: true, of: (one) => one.is_abandoned ? `${one.height}, abandoned` : one.height},
        {name: "Digest", of: (one) => short(one.digest.replace("sha256:", ""), 16)},
        {name: "Soup", of: (one) => short(one.soup, 16)},
        {name: "Round", number: true, of: (one) => el("a", {href: `/rounds/${one.server_round}`}, one.server_round)},
        {name: "Updates", number: true, of: (one) => number(one.num_updates)},
        {name: "Merged from", class: "reason", of: helpers},
        {name: "Sent in", number: true, of: (one) => bytes(one.uploaded_bytes)},
        {name: "Sent out", number: true, of: (one) => bytes(one.soup_bytes)},
        {name: "Held-out loss", number: true, of: (one) => number(one.heldout_after)},
        {name: "Change", number: true, of: (one) => change(one.heldout_before, one.heldout_after)},
        {name: "Made", of: (one) => ago(one.committed_at)},
      ], found.versions, {label: "Versions, the newest first"})]
      : empty("Version 0 is the base. The first committed round makes version 1.", el("a", {href: "/"}, "See the round")));
    replace(pages, pager({offset, limit: LIMIT, total: found.total, turn, label: "Pages of versions"}));
  }
  const turn = (to) => { offset = to; remember({offset: offset || ""}); return load(); };

  let curves = [];
  async function plot() {
    const found = await api("model/figures");
    losses.set([{name: "held-out loss", points: found.heldout}], {none: noLoss(found.is_measured)});
    curves = found.evaluations;
    draw();
  }
  function draw() {
    scores.node.hidden = !curves.length;
    if (!curves.length) { replace(tasks, el("div", {class: "state empty"}, el("p", {}, "No version was evaluated at the gate. With gate.evals in the hub's config every soup is, and its figures are here."))); return; }
    scores.set(curves.slice(first, first + CURVES).map((curve) => ({name: `${curve.task} (${curve.metric})`, points: curve.points.map(([height, value]) => [height, value])})));
    scores.node.hidden = false;
    replace(tasks, pager({offset: first, limit: CURVES, total: curves.length, turn: (to) => { first = to; draw(); }, label: "Tasks in the chart"}));
  }

  root.append(el("header", {}, el("h1", {}, "Model")), figures, groups, el("div", {class: "columns"}, losses.node, el("div", {}, scores.node, tasks)), newest.node, section("Chain of versions", chain, pages), taken, section("Base", base));
  await Promise.all([load(), plot()]);
  refreshOn(["version"], () => Promise.all([offset ? null : load(), plot()]));
  refreshOn(["newest-model", "position"], async () => { if (newest.isOn()) newest.set(await api("model/newest")); });
}

// ---- answers of the newest version ----

const PHASES = {waiting: ["hollow", () => "Not loaded yet"], writing: ["half", (name) => `${name} is written to a folder`], loading: ["half", (name) => `${name} is loaded`],
  answering: ["half", (name) => `${name} answers`], ready: ["filled", (name) => `${name} is ready`], failed: ["struck", (name) => `${name} is not served`]};
const named = (version) => (version === null ? "The newest version" : version === 0 ? "Version 0, the base," : `Version ${number(version)}`);

// Answers to the operator's prompts next to those of the previous version, and a question box for operators.
export function newestPanel() {
  const said = el("div", {class: "stack", role: "status"}), list = el("div", {}), box = questionBox();
  const node = section("Answers of the newest version", said, list, box.node);
  let isOn = false;
  node.hidden = true;
  return {
    node,
    isOn: () => isOn,
    set(found) {
      isOn = found.is_on;
      node.hidden = !found.is_on && !mayChange();
      box.node.hidden = !found.is_on || found.is_hidden || !found.may_ask;
      if (!found.is_on) { replace(said, el("p", {class: "quiet"}, "Off. With ", el("code", {}, "dashboard: {ask: true, prompts: [\"…\"]}"), " in gym-server.yaml, every version answers these prompts after its round, and you can ask it more.")); return; }
      if (found.is_hidden) { replace(said, el("p", {class: "quiet"}, "Only members of this hub may have its model, so its answers are for operators.")); return; }
      const [shape, text] = PHASES[found.phase];
      replace(said,
        el("p", {class: "sentence"}, state(shape, text(named(found.version))), shape === "half" && el("span", {class: "quiet"}, waited(found.seconds)), found.bytes > 0 && el("span", {class: "quiet small"}, ` · ${bytes(found.bytes)} on disk`)),
        found.phase === "failed" && mayChange() && el("details", {}, el("summary", {}, "What its process printed"), el("pre", {class: "output"}, (found.output || []).join("\n") || "Nothing.")),
        found.phase === "failed" && mayChange() && action("Try again", () => post("model/newest/again")));
      replace(list, found.prompts.length ? el("ol", {class: "prompts", "aria-label": "Prompts"}, found.prompts.map((row) => promptRow(row, found)))
        : mayChange() && el("p", {class: "quiet"}, "There are no fixed prompts. Those of ", el("code", {}, "dashboard.prompts"), " are answered here after every round."));
      box.set(["answering", "ready"].includes(found.phase), named(found.version));
    },
  };
}

function promptRow({prompt, answers}, {version, phase}) {
  const [newest, before] = [answers.find((one) => one.version === version), answers.find((one) => one.version !== version)];
  const isSame = newest && before && !newest.problem && newest.text === before.text;
  const waits = !newest && (phase === "failed" ? el("p", {class: "quiet"}, "No answer.") : el("p", {class: "quiet"}, "Not answered yet."));
  return el("li", {class: "prompted"}, el("h3", {class: "said"}, prompt),
    el("div", {class: "answers two"},
      isSame ? answered(newest, `Versions ${number(before.version)} and ${number(version)}, unchanged`) : [
        newest ? answered(newest, `Version ${number(version)}`) : el("div", {class: "answer"}, el("p", {class: "who"}, named(version)), waits),
        before && answered(before, `Version ${number(before.version)}`)]));
}

const answered = ({text, is_cut, problem}, who) => el("div", {class: "answer"}, el("p", {class: "who"}, who, is_cut && " · cut"),
  problem ? el("p", {class: "problem"}, problem) : text ? el("p", {class: "said"}, text) : el("p", {class: "quiet"}, "An empty answer."));

function questionBox() {
  let running = null, isReady = false, who = "";
  const field = el("textarea", {id: "question", rows: 2, maxlength: 4000, oninput: draw, onkeydown: (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); ask(); }
  }});
  const send = el("button", {class: "primary", type: "submit"}, "Ask"), stop = el("button", {type: "button", onclick: () => running?.abort()}, "Stop");
  const label = el("label", {for: "question"}), answer = el("div", {}), problem = el("p", {class: "problem", role: "alert"}), spoken = el("p", {class: "visually-hidden", role: "status"});
  const node = el("form", {class: "question", onsubmit: (event) => { event.preventDefault(); ask(); }},
    el("div", {class: "field"}, label, field), el("div", {class: "row"}, send, stop, el("span", {class: "quiet small"}, "Enter sends, Shift+Enter starts a new line")), problem, answer, spoken);
  leave(() => running?.abort());

  async function ask() {
    const prompt = field.value.trim();
    if (running || !isReady || !prompt) return;
    const words = el("p", {class: "said"});
    running = new AbortController();
    field.value = "";
    replace(problem);
    replace(answer, el("div", {class: "prompted"}, el("h3", {class: "said"}, prompt), el("div", {class: "answer"}, el("p", {class: "who"}, who), words)));
    draw();
    try {
      await streamed("model/newest/ask", {prompt}, running.signal, (data) => {
        if (data.error) throw new Error(data.error.message);
        for (const choice of data.choices) words.append(choice.delta ? choice.delta.content || "" : choice.text || "");
      });
      if (!words.textContent) words.replaceWith(el("p", {class: "quiet"}, "An empty answer."));
    } catch (error) {
      if (error.name !== "AbortError") replace(problem, message(error));
    }
    spoken.textContent = words.textContent;
    running = null;
    draw();
  }
  function draw() {
    stop.hidden = !running;
    send.hidden = Boolean(running);
    send.disabled = !isReady || !field.value.trim();
  }
  draw();
  return {node, set(ready, name) {
    [isReady, who] = [ready, name];
    label.textContent = ready ? "Ask the newest version" : "Ask the newest version, when it is loaded";
    draw();
  }};
}
