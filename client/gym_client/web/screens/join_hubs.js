// The hubs that this home contributes to: balance, score of each update with its error, verdicts, receipts, leaving.
import {action, ago, api, bytes, count, el, failed, figure, loading, mayChange, number, outcome, post, replace, say, section, short, signed, table} from "../static/app.js";

const RECEIPTS = 200, VERDICTS = 100;

// hubsPanel({changed}) -> {node, draw(answer of "join")}
export function hubsPanel({changed}) {
  const node = el("div", {class: "below"}), accounts = new Map(); // of each hub what was shown last, until there is news

  function draw({hubs, receipts, num_receipts: total}) {
    replace(node, hubs.map((one) => drawHub(one)), receipts.length > 0 && section("Receipts", el("p", {class: "quiet"}, `${count(total, "receipt")}, each signed by its hub${total > RECEIPTS ? `; the newest ${RECEIPTS} are shown` : ""}.`), receiptTable(receipts)));
  }

  function drawHub(one) {
    if (!accounts.has(one.address)) accounts.set(one.address, el("div", {class: "below"}, loading()));
    const account = accounts.get(one.address), asked = new URLSearchParams({server: one.address});
    const load = () => Promise.all([api(`join/account?${asked}`), api(`join/rewards?${asked}`)]).then(([found, worth]) => drawAccount(account, one, found, worth)).catch((error) => replace(account, failed(error, () => { replace(account, loading()); load(); })));
    load();
    return section(one.name || one.address, el("div", {class: "spread"}, el("span", {class: "quiet"}, `${one.address} · you are ${one.contributor}${one.left ? " · left" : ""}`),
      mayChange() && !one.left && action("Leave", () => leaveHub(one), {confirm: `Leave ${one.name || one.address}? You get no more tasks; what was earned stays in its ledger.`})), account);
  }

  async function leaveHub(one) {
    const job = await post("join/leave", {server: one.address});
    for (;;) {
      await new Promise((then) => setTimeout(then, 500));
      const {status, exit_code: code} = await api(`jobs/${job.id}`);
      if (status === "running") continue;
      if (code !== 0) throw new Error((await api(`jobs/${job.id}/output?offset=-4000`)).text.match(/"message": "([^"]+)"/)?.[1] || `The command ended with code ${code}`);
      break;
    }
    say(`You have left ${one.name || one.address}`);
    await changed();
  }

  async function drawAccount(account, one, found, worth) {
    const rounds = worth.rounds.filter((row) => row.score !== undefined && row.score !== null).reverse(), plot = el("div", {hidden: true});
    replace(account,
      el("div", {class: "figures"}, figure("Balance", number(found.balance), "credits"), worth.reputation !== undefined && figure("Reputation", number(worth.reputation, 3), "from 0 to 1"), figure("Round", number(found.server_round), found.round_state), figure("Sent", bytes(found.bytes_up)), figure("Fetched", bytes(found.bytes_down))),
      plot,
      table([
        {name: "Round", number: true, of: (row) => row.server_round},
        {name: "Verdict", of: (row) => outcome(row.verdict)},
        ...(rounds.length ? [{name: "Contribution", number: true, of: (row) => worthOf(worth.rounds.find((other) => other.update === row.update))}] : []),
        {name: "Credit", number: true, of: (row) => number(row.credit)},
        {name: "Size", number: true, of: (row) => bytes(row.bytes)},
        {name: "Reason", class: "reason", of: (row) => row.reason},
      ], found.verdicts.slice(0, VERDICTS), {label: `Verdicts of ${one.address}`, none: "No verdicts on your updates yet."}));
    if (!rounds.length) return;
    const {chart} = await import("../static/charts.js");
    const worthOverTime = chart({title: "Your contribution, in nats of held-out loss", xLabel: "round", height: 200});
    plot.hidden = false;
    replace(plot, worthOverTime.node);
    worthOverTime.set([{name: "contribution", points: rounds.map((row) => [row.server_round, row.score]), errors: rounds.map((row) => row.error ?? null)}]);
  }

  function receiptTable(receipts) {
    return table([
      {name: "Entry", number: true, of: (row) => number(row.sequence)},
      {name: "Round", number: true, of: (row) => number(row.server_round)},
      {name: "What", of: (row) => (row.verdict ? outcome(row.verdict) : row.kind)},
      {name: "Contribution", number: true, of: worthOf},
      {name: "Credit", number: true, of: (row) => number(row.credit ?? row.amount)},
      {name: "Update", of: (row) => row.update && short(row.update)},
      {name: "Hub", of: (row) => row.server && short(row.server)},
      {name: "When", number: true, of: (row) => ago(row.at)},
    ], receipts, {label: "Receipts"});
  }

  return {node, draw};
}

const worthOf = (row) => (row?.score === undefined || row.score === null ? null : row.error === undefined || row.error === null ? signed(row.score) : `${signed(row.score)} ± ${number(row.error, 3)}`);
