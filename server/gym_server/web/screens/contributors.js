// The contributors screen: all accounts with credits, reputation and recent verdicts.
import {api, count, el, empty, loading, number, remember, replace, state, table} from "../static/app.js";
import {pager, person, refreshOn, strip, stripLegend} from "./parts.js";

export const title = "Contributors";
const LIMIT = 50;
const SORTS = [["enrolled", "Enrolment"], ["name", "Name"], ["credits", "Credits"], ["reputation", "Reputation"]];

export async function show(root, _, query) {
  let offset = Number(query.get("offset")) || 0, find = query.get("find") || "", sort = query.get("sort") || "enrolled";
  const total = el("p", {class: "quiet", "aria-live": "polite"}), rows = el("div", {}, loading()), pages = el("div");
  const field = el("input", {id: "find", type: "search", maxlength: 80, value: find, placeholder: "name or id", oninput: () => later()});
  const order = el("select", {id: "sort", onchange: () => { sort = order.value; turn(0); }}, SORTS.map(([value, text]) => el("option", {value, selected: value === sort}, text)));
  let waiting = null;
  const later = () => { clearTimeout(waiting); waiting = setTimeout(() => { find = field.value.trim(); turn(0); }, 250); };
  const turn = (to) => { offset = to; remember({offset: offset || "", find, sort: sort === "enrolled" ? "" : sort}); return load(); };

  async function load() {
    const found = await api(`contributors?${new URLSearchParams({offset, limit: LIMIT, find, sort})}`);
    replace(total, find ? `${number(found.total)} found` : count(found.total, "account"));
    const columns = [
      {name: "Contributor", of: (one) => el("div", {class: "named"}, person(one.contributor, one.name), el("span", {class: "id quiet"}, one.contributor.slice(0, 13)))},
      {name: "Account", of: (one) => account(one)},
      {name: "Credits", number: true, of: (one) => number(one.balance)},
      {name: "Reputation", number: true, of: (one) => one.reputation.toFixed(3)},
      {name: `Last ${count(Math.min(found.strip_rounds, Math.max(1, found.newest_round)), "round")}`, of: (one) => strip(one.strip, found.newest_round, found.strip_rounds)},
    ];
    if (found.has_privacy) columns.push({name: "Epsilon", number: true, of: (one) => number(one.epsilon, 3)});
    replace(rows, found.total ? table(columns, found.contributors, {label: "Contributors"})
      : find ? empty("No contributor has this name or id.", el("button", {type: "button", onclick: () => { field.value = ""; find = ""; turn(0); }}, "Show everybody"))
      : empty("Nobody has joined yet. Hand out an invite, or the address of an open hub.", el("a", {class: "button", href: "/invites"}, "Create an invite")));
    replace(pages, pager({offset, limit: LIMIT, total: found.total, turn, label: "Pages of contributors"}));
  }

  root.append(el("header", {}, el("h1", {}, "Contributors"), total),
    el("div", {class: "spread"},
      el("div", {class: "row"},
        el("div", {class: "field"}, el("label", {for: "find"}, "Find"), field),
        el("div", {class: "field"}, el("label", {for: "sort"}, "Order"), order)),
      stripLegend()),
    rows, pages);
  await load();
  refreshOn(["verdict", "version", "ledger"], load);
}

export function account(one) {
  if (one.status === "revoked") return state("struck", "revoked");
  if (one.status === "left") return state("hollow square", "left");
  if (one.connected === null) return state("half", "active");
  return one.connected ? state("filled", "connected") : state("hollow", "away");
}
