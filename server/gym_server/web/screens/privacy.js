// The privacy screen: the guarantee, the budget spent per contributor, and the number of rounds that it still allows.
import {api, copyable, count, el, facts, figure, loading, number, progress, remember, replace, section, state, table} from "../static/app.js";
import {pager, person, refreshOn} from "./parts.js";

export const title = "Privacy";
const LIMIT = 50;

export async function show(root, _, query) {
  let offset = Number(query.get("offset")) || 0;
  const body = el("div", {class: "screen"}, loading());

  async function load() {
    const found = await api(`privacy?offset=${offset}&limit=${LIMIT}`);
    const central = found.central;
    replace(body, central.epsilon ? budget(found, central) : nothing(found), others(found));
  }
  const turn = (to) => { offset = to; remember({offset: offset || ""}); return load(); };

  function budget(found, central) {
    const over = central.epsilon_after_next_round > central.epsilon;
    const gauge = el("div", {class: "budget"}, progress(central.epsilon_spent, central.epsilon, `epsilon ${number(central.epsilon_spent)} of ${number(central.epsilon)} is spent`),
      el("div", {class: "spread small quiet"}, el("span", {}, "0"), el("span", {}, `budget ${number(central.epsilon)}`)));
    const next = el("i", {class: "next", title: "after the next round"});
    next.style.left = `${Math.min(100, (100 * central.epsilon_after_next_round) / central.epsilon)}%`;
    gauge.firstChild.append(next);
    return [
      el("div", {class: "figures"},
        figure("Epsilon spent", number(central.epsilon_spent), `of ${number(central.epsilon)}`),
        figure("After the next round", number(central.epsilon_after_next_round), over ? "beyond the budget" : "the mark on the bar"),
        figure("Rounds left", found.rounds_paid >= found.max_rounds_ahead ? `${number(found.max_rounds_ahead)}+` : number(found.rounds_paid), `${number(central.rounds)} are paid`),
        figure("Delta", central.target_delta.toExponential(), "the share that epsilon leaves out")),
      gauge,
      over && el("p", {class: "sentence"}, state("half", "The budget is spent: no further round starts.")),
      found.rounds_without_noise ? el("p", {class: "problem"}, `${count(found.rounds_without_noise, "committed round was", "committed rounds were")} merged without noise and are not covered.`) : null,
      el("div", {class: "columns"},
        section("By mechanism", table([
          {name: "Mechanism", of: (event) => event.mechanism},
          {name: "Noise multiplier", number: true, of: (event) => number(event.noise_multiplier)},
          {name: "Rounds", number: true, of: (event) => number(event.count)},
        ], central.events, {label: "Spent by mechanism", none: "Nothing is spent yet: no round has been merged."})),
        section("What is promised", facts([
          ["Aggregator", central.aggregator], ["Mechanism", central.mechanism], ["Noise multiplier", number(central.noise_multiplier)],
          ["Clipping norm", `${number(central.clipping_norm)} (${central.clipping}${central.adaptive_clipping ? ", adaptive" : ""})`],
          ["Accountant", central.accountant === "rdp" ? "Renyi divergences" : "closed form, privacy loss distributions"],
          ["Neighbours", central.adjacency], ["Sampling", central.sampling]]))),
      section("By contributor", table([
        {name: "Contributor", of: (one) => person(one.contributor, one.name)},
        {name: "Rounds", number: true, of: (one) => number(one.rounds)},
        {name: "Epsilon", number: true, of: (one) => number(one.epsilon)},
        {name: "Of the budget", of: (one) => progress(one.epsilon, central.epsilon, `${number(one.epsilon)} of ${number(central.epsilon)}`)},
      ], found.contributors, {label: "Epsilon by contributor", none: "Nothing is spent yet."}),
      pager({offset, limit: LIMIT, total: found.total, turn, label: "Pages of contributors"})),
    ];
  }

  root.append(el("header", {}, el("h1", {}, "Privacy"), el("p", {class: "quiet"}, "what the hub reveals about the updates that it receives")), body);
  await load();
  refreshOn(["version", "ledger"], load);
}

const nothing = (found) => el("div", {class: "state empty"},
  el("p", {}, "This hub promises no differential privacy: soups are merged without noise."),
  found.rounds_without_noise ? el("p", {}, `${count(found.rounds_without_noise, "round was", "rounds were")} merged without noise, so privacy can no longer be enabled on this hub. Start another hub with this model as its base.`)
    : [el("p", {}, "Add a privacy section to gym-server.yaml before the first round:"), copyable("privacy:\n  mechanism: gaussian\n  noise_multiplier: 5.0\n  clipping_norm: 1.0\n  epsilon: 5.0\n  target_delta: 1.0e-5")]);

const others = (found) => section("Beside it", facts([
  ["Secure aggregation", found.secure_aggregation ? `on, threshold ${found.secure_aggregation.threshold}: the operator sees only sums` : "off: the operator sees single updates"],
  ["On contributors' machines", found.local ? `DP-SGD, noise multiplier ${number(found.local.noise_multiplier)}, norm of a gradient at most ${number(found.local.max_grad_norm)}` : "no local privacy is required"]]));
