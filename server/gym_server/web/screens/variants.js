// The variants screen: totals for all visitors, and for the operator the list and takedowns.
import {action, api, bytes, count, el, figure, loading, number, post, replace, say, section, state, table, when} from "../static/app.js";
import {ask, person, refreshOn} from "./parts.js";

export const title = "Variants";

export async function show(root) {
  const figures = el("div", {class: "figures"}), lists = el("div", {class: "screen"}, loading()), about = el("p", {class: "quiet"});
  let pages = [""];

  async function load() {
    const found = await api("variants");
    replace(figures, figure("Variants", number(found.number)), figure("Owners", number(found.owners)), figure("Stored", bytes(found.bytes)), figure("The largest", found.number ? bytes(found.largest_bytes) : null), figure("Taken down", number(found.taken_down)));
    replace(about, found.enabled ? "" : "This hub does not store variants (variants.enabled).");
    if (!found.is_operator) {
      replace(lists, el("p", {class: "quiet"}, "Names and readers are hidden from anyone who may not read the variant. Its owner sees them with gym variant hub list."));
      return;
    }
    const {variants, taken_down: down, next} = await api(`variants/list?${new URLSearchParams({after: pages.at(-1)})}`);
    replace(lists, section("On the hub", table([
      {name: "Owner", of: (one) => person(one.owner, one.owner_name)},
      {name: "Name", of: (one) => one.name},
      {name: "Revision", number: true, of: (one) => one.revision},
      {name: "Made on", of: (one) => one.base},
      {name: "Size", number: true, of: (one) => bytes(one.bytes)},
      {name: "Read by", of: (one) => (one.readers === "everyone" ? state("filled", "everyone") : one.readers ? state("half", count(one.readers, "other")) : state("hollow", "its owner"))},
      {name: "Key", of: (one) => one.key_status},
      {name: "Put", of: (one) => when(one.put_at)},
      {name: "", of: (one) => (found.may_change ? el("button", {type: "button", onclick: () => takeDown(one)}, "Take down") : "")},
    ], variants, {label: "Variants", none: "No contributor keeps a variant here. They put one with gym variant push."}),
    el("div", {class: "row"}, pages.length > 1 && el("button", {type: "button", onclick: () => { pages.pop(); load(); }}, "Previous"), next && el("button", {type: "button", onclick: () => { pages.push(next); load(); }}, "Next"))),
    down.length ? section("Taken down", table([
      {name: "Owner", of: (one) => person(one.owner, one.owner_name)},
      {name: "Name", of: (one) => state("struck", one.name)},
      {name: "Reason", class: "reason", of: (one) => one.reason},
      {name: "", of: (one) => (found.may_change ? action("Allow again", async () => { await post("variants/allow", {owner: one.owner, name: one.name}); say("Its owner may put it again."); await load(); }) : "")},
    ], down, {label: "Variants that were taken down"})) : null);
  }

  const takeDown = (one) => ask("Take a variant down", `Nobody can read ${one.name} of ${one.owner_name || one.owner} any more, and its owner cannot push it again until you allow it.`, {
    label: "Reason", help: "It is written to the ledger, without the variant's name.", button: "Take down",
    run: async (reason) => { await post("variants/remove", {owner: one.owner, name: one.name, reason}); say("The variant is taken down."); await load(); },
  });

  root.append(el("header", {}, el("h1", {}, "Variants"), about), figures, lists);
  await load();
  refreshOn(["ledger"], load);
}
