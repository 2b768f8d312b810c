// The contributor screen: credits, reputation over time, recent verdicts, and revocation for the operator.
import {api, count, el, figure, loading, number, outcome, post, replace, say, section, state, table, when} from "../static/app.js";
import {chart} from "../static/charts.js";
import {account} from "./contributors.js";
import {ask, refreshOn, strip, stripLegend, withError} from "./parts.js";

export const title = "Contributor";
const ROWS = 25;

export async function show(root, {id}) {
  const head = el("header"), figures = el("div", {class: "figures"}), marks = el("div", {class: "marks"}), rows = el("div", {}, loading()), more = el("div"), keys = el("div"), acts = el("div", {class: "row"});
  const reputation = chart({title: "Reputation", xLabel: "round", height: 220});
  const earned = chart({title: "Credits earned, in all", xLabel: "round", height: 220});
  const worth = chart({title: "Contribution, in nats of held-out loss", xLabel: "round", height: 220});
  let shown = ROWS;

  async function load() {
    const found = await api(`contributors/${encodeURIComponent(id)}`);
    document.title = document.title.replace(/^.* · /, `${found.name} · `);
    replace(head, el("div", {}, el("h1", {}, found.name || found.contributor), el("p", {class: "id quiet"}, found.contributor)), account(found));
    const merged = found.strip.filter((one) => one.verdict === "merged").length;
    replace(figures,
      figure("Credits", number(found.balance), found.held || found.reserved ? `${number(found.available)} can be moved` : ""),
      figure("Reputation", found.reputation.toFixed(3), "from 0 to 1"),
      figure("Merged", number(merged), `of the last ${count(Math.min(found.newest_round, found.strip_rounds), "round")}`),
      found.privacy && figure("Epsilon spent", number(found.privacy.epsilon, 4), `of ${number(found.privacy.budget)}, in ${count(found.privacy.rounds, "round")}`),
      figure("Member since", new Date(found.enrolled_at * 1000).toLocaleDateString()));
    replace(marks, found.newest_round ? [strip(found.strip, found.newest_round, found.strip_rounds), stripLegend()] : el("p", {class: "quiet"}, "No round has begun."));
    const begun = found.is_whole && found.over_rounds.length ? [[found.over_rounds[0].server_round - 1, 0]] : []; // a new account has neither
    reputation.set([{name: "after the round", points: [...begun, ...found.over_rounds.map((one) => [one.server_round, one.reputation])]}]);
    let sum = 0;
    earned.set([{name: "credits", points: [...begun, ...found.over_rounds.map((one) => [one.server_round, (sum += one.credit)])]}]);
    const scored = found.over_rounds.filter((one) => one.score !== null);
    worth.node.hidden = !scored.length;
    if (scored.length) worth.set([{name: "score", points: scored.map((one) => [one.server_round, one.score]), errors: scored.map((one) => one.error)}]);
    const of = new Map(found.over_rounds.map((one) => [one.server_round, one]));
    const newest = [...found.strip].reverse();
    replace(rows, table([
      {name: "Round", number: true, of: (one) => el("a", {href: `/rounds/${one.server_round}`}, one.server_round)},
      {name: "Verdict", of: (one) => outcome(one.verdict)},
      {name: "Score", number: true, of: (one) => withError(of.get(one.server_round)?.score, of.get(one.server_round)?.error)},
      {name: "Credit", number: true, of: (one) => number(of.get(one.server_round)?.credit ?? null)},
      {name: "Reason", class: "reason", of: (one) => one.reason},
    ], newest.slice(0, shown), {label: "Verdicts", none: "No update of theirs has a verdict in the last rounds."}));
    replace(more, newest.length > shown && el("button", {type: "button", onclick: () => { shown = newest.length; load(); }}, `Show all ${newest.length}`));
    replace(keys, found.keys && section("Keys", table([
      {name: "Public key", of: (key) => el("span", {class: "id"}, key.public_key)},
      {name: "It is", of: (key) => state({active: "filled", rotated: "hollow", revoked: "struck"}[key.status] || "hollow", key.status)},
      {name: "From", of: (key) => when(key.from)},
      {name: "Until", of: (key) => when(key.until)},
    ], found.keys, {label: "Keys"})));
    replace(acts, found.may_change && (found.status === "revoked" ? rebind(found) : revoke(found)));
  }

  const revoke = (found) => el("button", {type: "button", onclick: () => ask("Revoke the key", `Sessions, tasks, uploads and pending transfers of ${found.name} end at once. Another key can be bound later.`, {
    label: "Reason", help: "It is written to the ledger, which everybody can read.", button: "Revoke",
    run: async (reason) => { const done = await post(`contributors/${encodeURIComponent(id)}/revoke`, {reason}); say(`The key is revoked; ${count(done.cancelled_transfers, "transfer is", "transfers are")} cancelled.`); await load(); },
  })}, "Revoke the key");
  const rebind = (found) => el("button", {type: "button", onclick: () => ask("Bind another key", `Verify who requests it: whoever has the new key is ${found.name} from then on.`, {
    label: "Public key", help: "64 hex digits: gym-client id --json in a new home shows it.", button: "Bind",
    run: async (key) => { await post(`contributors/${encodeURIComponent(id)}/rebind`, {public_key: key}); say("The account has the new key."); await load(); },
  })}, "Bind another key");

  root.append(head, figures, section("Verdicts", marks), el("div", {class: "columns"}, worth.node, reputation.node, earned.node), section("By round", rows, more), keys, acts,
    el("p", {}, el("a", {href: `/ledger?contributor=${encodeURIComponent(id)}`}, "Entries of the ledger that name this contributor")));
  await load();
  refreshOn(["verdict", "version", "ledger"], load);
}
