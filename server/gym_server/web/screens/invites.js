// The invites screen, for the operator: create (shown once, with a QR code), list and cancel invites.
import {action, api, copyable, count, el, empty, loading, message, post, remember, replace, say, section, session, state, table, when} from "../static/app.js";
import {pager, person, refreshOn} from "./parts.js";

export const title = "Invites";
const LIMIT = 50;
const SHAPES = {open: "filled", used: "half", expired: "hollow", cancelled: "struck"};
const TIMES = [[24, "a day"], [72, "3 days"], [168, "a week"], [720, "30 days"]];

export async function show(root, _, query) {
  if (session.role !== "operator") {
    root.append(el("header", {}, el("h1", {}, "Invites")), empty("Only an operator sees invites. To join, ask this hub's coordinator for one."));
    return;
  }
  let offset = Number(query.get("offset")) || 0;
  const rows = el("div", {}, loading()), pages = el("div"), made = el("div", {"aria-live": "polite"}), maker = el("div"), policy = el("p", {class: "quiet"});
  const turn = (to) => { offset = to; remember({offset: offset || ""}); return load(); };

  async function load() {
    const found = await api(`invites?offset=${offset}&limit=${LIMIT}`);
    replace(policy, {invite: "Only contributors with an invite can join.", open: "This hub is open: joining needs no invite.", "allow-list": "Only contributors on the allow-list can join."}[found.policy] || "");
    if (!maker.firstChild) replace(maker, found.may_change ? form() : el("p", {class: "quiet"}, "This dashboard only reads the hub's folder. Create invites on the running hub's dashboard, or with gym-server invites create."));
    replace(rows, table([
      {name: "Invite", of: (one) => el("span", {class: "id"}, one.id)},
      {name: "State", of: (one) => state(SHAPES[one.state], one.state)},
      {name: "Note", class: "reason", of: (one) => one.note},
      {name: "Used by", of: (one) => (one.used_by ? person(one.used_by, one.used_by_name) : null)},
      {name: "Created", of: (one) => when(one.created_at)},
      {name: "Until", of: (one) => when(one.expires_at)},
      {name: "", of: (one) => (one.state === "open" && found.may_change ? action("Cancel", async () => { await post(`invites/${one.id}`, {}, "DELETE"); say("The invite is cancelled."); await load(); }, {confirm: `Cancel invite ${one.id}? Nobody can use it any more.`}) : "")},
    ], found.invites, {label: "Invites, the newest first", none: found.may_change ? "No invite yet. Create one above, and give it to one person." : "No invite yet."}));
    replace(pages, pager({offset, limit: LIMIT, total: found.total, turn, label: "Pages of invites"}));
  }

  function form() {
    const note = el("input", {id: "note", type: "text", maxlength: 200, placeholder: "who gets it", autocomplete: "off"});
    const hours = el("select", {id: "hours"}, TIMES.map(([value, text]) => el("option", {value, selected: value === 168}, text)));
    const said = el("span", {class: "problem", role: "alert"}), button = el("button", {class: "primary"}, "Create an invite");
    return el("form", {class: "row ends", onsubmit: async (event) => {
      event.preventDefault();
      button.disabled = true;
      replace(said);
      try { replace(made, once(await post("invites", {note: note.value, valid_hours: Number(hours.value)}))); note.value = ""; await load(); }
      catch (error) { replace(said, message(error)); } finally { button.disabled = false; }
    }},
    el("div", {class: "field grow"}, el("label", {for: "note"}, "Note, kept on the hub only"), note),
    el("div", {class: "field"}, el("label", {for: "hours"}, "Works for"), hours), button, said);
  }

  const once = (invite) => el("section", {class: "panel invite"},
    el("div", {class: "invite-text"}, el("h2", {}, "Copy it now: it is shown only once"),
      el("p", {class: "quiet"}, `It admits one contributor within ${count(invite.valid_hours, "hour")}. The hub keeps only its hash.`),
      copyable(invite.message), el("p", {class: "quiet small"}, "The link alone, as in the QR code:"), copyable(invite.invite),
      el("button", {type: "button", onclick: () => replace(made)}, "Done, hide it")),
    qr(invite.code));

  root.append(el("header", {}, el("h1", {}, "Invites"), policy), maker, made, section("All invites", rows, pages));
  await load();
  refreshOn(["ledger"], load);
}

// Dark on light in both themes, with the quiet zone of four modules that QR readers need.
function qr(rows) {
  const size = rows.length + 8;
  const dark = rows.flatMap((row, y) => [...row].map((module, x) => (module === "1" ? `M${x + 4} ${y + 4}h1v1h-1z` : ""))).join("");
  return el("svg", {class: "qr", viewBox: `0 0 ${size} ${size}`, role: "img", "aria-label": "The invite as a QR code", "shape-rendering": "crispEdges"},
    el("rect", {class: "light", width: size, height: size}), el("path", {class: "dark", d: dark}));
}
