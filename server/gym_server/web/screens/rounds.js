// The rounds screen: the held-out loss by version, and a paged list of rounds, newest first.
import {ago, api, bytes, count, el, empty, leave, number, on, outcome, remember, replace, table} from "../static/app.js";
import {chart} from "../static/charts.js";
import {change, counted, noLoss} from "./parts.js";

export const title = "Rounds";
const COLUMNS = [
  {name: "Round", number: true, of: (round) => el("a", {href: `/rounds/${round.server_round}`}, round.server_round)},
  {name: "State", of: (round) => outcome(round.state)},
  {name: "Version", number: true, of: (round) => round.version},
  {name: "Loss before", number: true, of: (round) => number(round.heldout_before)},
  {name: "after", number: true, of: (round) => number(round.heldout_after)},
  {name: "Change", number: true, of: (round) => change(round.heldout_before, round.heldout_after)},
  {name: "Updates", class: "reason", of: (round) => [counted(round.verdicts), round.reason && el("div", {class: "quiet small"}, round.reason)]},
  {name: "Soup", number: true, of: (round) => bytes(round.soup_bytes)},
  {name: "Ended", of: (round) => ago(round.closed_at)},
];

export async function show(root, _, query) {
  const curve = chart({title: "Held-out loss by version", xLabel: "version", height: 240});
  const rows = el("div", {"aria-live": "off"}), pages = el("nav", {class: "row", "aria-label": "Pages of rounds"}), total = el("p", {class: "quiet"});
  let before = Number(query.get("before")) || null;
  let waiting = null;

  async function load(scroll = false) {
    const found = await api(`rounds?limit=50${before ? `&before=${before}` : ""}`);
    replace(total, count(found.total, "round"));
    replace(rows, found.total ? table(COLUMNS, found.rounds, {label: "Rounds"}) : empty("No round yet. Rounds begin when enough contributors are connected.", el("a", {href: "/"}, "See who is connected")));
    replace(pages,
      before && el("button", {type: "button", onclick: () => turn(null)}, "Newest"),
      found.before && el("button", {type: "button", onclick: () => turn(found.before)}, "Older"));
    if (scroll) rows.scrollIntoView({block: "start"});
  }
  function turn(to) { before = to; remember({before}); load(true); }
  async function plot() {
    const {points, step, is_measured: isMeasured} = await api("rounds/losses");
    curve.set([{name: "after the round", points: points.map(([height, , after]) => [height, after])},
      {name: "before it", points: points.map(([height, early]) => [height, early])}], {none: noLoss(isMeasured)});
    curve.node.querySelector("figcaption").textContent = `Held-out loss by version${step > 1 ? `, every ${step}th` : ""}`;
  }
  function changed() {
    if (waiting === null) waiting = setTimeout(() => { waiting = null; if (!before) load(); plot(); }, 500);
  }

  root.append(el("header", {}, el("h1", {}, "Rounds"), total), curve.node, rows, pages);
  await Promise.all([load(), plot()]);
  let state = "";
  on("snapshot", (now) => { if (state && state !== `${now.server_round} ${now.state}`) changed(); state = `${now.server_round} ${now.state}`; });
  on("version", changed);
  leave(() => clearTimeout(waiting));
}
