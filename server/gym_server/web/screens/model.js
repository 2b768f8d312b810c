// The model's versions: how well each does, and the chain of digests that they are.
import {ago, api, bytes, el, empty, facts, figure, loading, number, remember, replace, section, short, signed, state, table} from "/static/app.js";
import {chart} from "/static/charts.js";
import {pager, refreshOn} from "/screens/parts.js";

export const title = "Model";
const LIMIT = 25, CURVES = 6;

export async function show(root, _, query) {
  let offset = Number(query.get("offset")) || 0, first = 0;
  const figures = el("div", {class: "figures"}), chain = el("div", {}, loading()), pages = el("div"), base = el("div"), tasks = el("div");
  const losses = chart({title: "Held-out loss by version", xLabel: "version", height: 240});
  const scores = chart({title: "Evaluations by version", xLabel: "version", height: 240});

  async function load() {
    const found = await api(`model?offset=${offset}&limit=${LIMIT}`);
    replace(figures,
      figure("Version", number(found.version), found.base_model),
      figure("Weights", number(found.num_parameters)),
      figure("Fetched by each contributor", bytes(found.soups_bytes), `${number(found.total)} soups since the base`));
    replace(base, facts([["Base model", found.base_model], ["Its digest", el("span", {class: "id"}, found.base_digest)]]));
    replace(chain, found.total ? [
      found.chain_is_whole ? el("p", {class: "sentence"}, state("filled", "Each digest follows from the version before it and its soup")) : el("p", {class: "problem", role: "alert"}, "A digest does not follow from the version before it. Run gym-server ledger verify."),
      table([
        {name: "Version", number: true, of: (one) => one.height},
        {name: "Digest", of: (one) => short(one.digest.replace("sha256:", ""), 16)},
        {name: "Soup", of: (one) => short(one.soup, 16)},
        {name: "Round", number: true, of: (one) => el("a", {href: `/rounds/${one.server_round}`}, one.server_round)},
        {name: "Updates", number: true, of: (one) => number(one.num_updates)},
        {name: "Sent in", number: true, of: (one) => bytes(one.uploaded_bytes)},
        {name: "Sent out", number: true, of: (one) => bytes(one.soup_bytes)},
        {name: "Held-out loss", number: true, of: (one) => number(one.heldout_after)},
        {name: "Change", number: true, of: (one) => (one.heldout_before === null || one.heldout_after === null ? null : signed(one.heldout_after - one.heldout_before))},
        {name: "Made", of: (one) => ago(one.committed_at)},
      ], found.versions, {label: "Versions, the newest first"})]
      : empty("Version 0 is the base. The first committed round makes version 1.", el("a", {href: "/"}, "See the round")));
    replace(pages, pager({offset, limit: LIMIT, total: found.total, turn, label: "Pages of versions"}));
  }
  const turn = (to) => { offset = to; remember({offset: offset || ""}); return load(); };

  let curves = [];
  async function plot() {
    const found = await api("model/figures");
    losses.set([{name: "held-out loss", points: found.heldout}]);
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

  root.append(el("header", {}, el("h1", {}, "Model")), figures, el("div", {class: "columns"}, losses.node, el("div", {}, scores.node, tasks)), section("Chain of versions", chain, pages), section("Base", base));
  await Promise.all([load(), plot()]);
  refreshOn(["version"], () => Promise.all([offset ? null : load(), plot()]));
}
