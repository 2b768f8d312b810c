// The ledger screen: recorded and signed entries, newest first, with the proof of every entry.
import {api, copyable, count, duration, el, empty, facts, figure, loading, message, number, remember, replace, section, short, state, table, when} from "../static/app.js";
import {dialog, person, refreshOn} from "./parts.js";

export const title = "Ledger";
const LIMIT = 50;

export async function show(root, _, query) {
  let before = Number(query.get("before")) || 0, kind = query.get("kind") || "", contributor = query.get("contributor") || "";
  const figures = el("div", {class: "figures"}), rows = el("div", {}, loading()), pages = el("nav", {class: "row", "aria-label": "Pages of entries"}), head = el("div");
  const kinds = el("select", {id: "kind", onchange: () => { kind = kinds.value; turn(0); }});
  const who = el("input", {id: "contributor", type: "search", maxlength: 80, value: contributor, placeholder: "whole id", onchange: () => { contributor = who.value.trim(); turn(0); }});
  const turn = (to) => { before = to; remember({before: before || "", kind, contributor}); return load(); };

  async function load() {
    const found = await api(`ledger?${new URLSearchParams({before, limit: LIMIT, kind, contributor})}`);
    const signed = found.head && found.head.head;
    replace(figures,
      figure("Entries", number(found.total)),
      figure("Newest signed head", signed ? number(signed.size) : null, signed ? when(signed.at) : "nothing is signed yet"),
      figure("Signed by", short(found.server, 9), "the hub's id"));
    replace(kinds, el("option", {value: ""}, "every kind"), found.kinds.map((one) => el("option", {value: one.kind, selected: one.kind === kind}, `${one.kind} (${number(one.count)})`)));
    kinds.value = kind;
    replace(rows, found.total ? table([
      {name: "Entry", number: true, of: (entry) => number(entry.sequence)},
      {name: "Kind", of: (entry) => (entry.kind === "sealed" ? state("half", "sealed") : entry.kind)},
      {name: "Round", number: true, of: (entry) => (entry.server_round ? el("a", {href: `/rounds/${entry.server_round}`}, entry.server_round) : null)},
      {name: "What", class: "reason", of: (entry) => what(entry, found.names)},
      {name: "Written", class: "nowrap", of: (entry) => written(entry)},
      {name: "Hash", class: "nowrap", of: (entry) => short(entry.hash, 10)},
      {name: "", of: (entry) => el("button", {type: "button", "aria-label": `Proof of entry ${entry.sequence}`, onclick: () => prove(entry.sequence)}, "Proof")},
    ], found.entries, {label: "Entries, the newest first", none: "No entry matches."})
      : empty("The ledger has no entry yet. The first contributor who joins writes one."));
    replace(pages, before > 0 && el("button", {type: "button", onclick: () => turn(0)}, "Newest"), found.next && el("button", {type: "button", onclick: () => turn(found.next)}, "Older"));
    replace(head, signed && facts([
      ["Size", number(signed.size)], ["Hash of its last entry", id(signed.hash)], ["Merkle root", id(signed.root)], ["Round", signed.server_round],
      ["Signature", id(found.head.signature)], ["Public key", id(found.public_key)]]));
  }

  root.append(el("header", {}, el("h1", {}, "Ledger"), el("a", {class: "button", href: "/api/v1/ledger/export", download: true}, "Download")), figures,
    el("div", {class: "row"},
      el("div", {class: "field"}, el("label", {for: "kind"}, "Kind"), kinds),
      el("div", {class: "field"}, el("label", {for: "contributor"}, "Names the contributor"), who)),
    rows, pages,
    section("Newest signed head", el("p", {class: "quiet"}, "One signature stands for every entry. Compare this head with one that somebody else was shown: gym-client ledger compare."), head),
    section("Check all of it", copyable("gym-server ledger verify --ledger DOWNLOADED.jsonl")));
  await load();
  refreshOn(["verdict", "version", "ledger"], () => (before ? null : load()));
}

const id = (text) => el("span", {class: "id"}, text);

const HIDDEN = new Set(["at", "at_bucket_seconds", "server_round", "contributor", "record", "round", "seal"]);
function what(entry, names) {
  if (entry.body === null) return el("span", {class: "quiet"}, `${count(entry.body_bytes, "byte")}; its proof shows them`);
  const parts = [];
  if (entry.body.contributor) parts.push(person(entry.body.contributor, names[entry.body.contributor]), " ");
  const fields = Object.entries(entry.body).filter(([name, value]) => !HIDDEN.has(name) && value !== "" && value !== null);
  if (entry.body.verdict) { parts.push(el("strong", {}, entry.body.verdict), entry.body.reason ? `: ${entry.body.reason}` : ""); return parts; }
  parts.push(el("span", {class: "quiet"}, fields.slice(0, 6).map(([name, value]) => `${name} ${brief(value)}`).join(" · ") || (entry.kind === "sealed" ? "opened by its contributor's receipt" : "")));
  return parts;
}
function brief(value) {
  if (Array.isArray(value)) return `[${value.length}]`;
  if (typeof value === "object") return `{${Object.keys(value).length}}`;
  if (typeof value === "number") return number(value);
  const text = String(value);
  return /^(sha256:)?[0-9a-f]{32,}$/.test(text) ? `${text.replace("sha256:", "").slice(0, 12)}…` : text.length > 80 ? `${text.slice(0, 80)}…` : text;
}
function written(entry) {
  if (!entry.at) return null;
  const at = el("span", {title: when(entry.at)}, new Date(entry.at * 1000).toLocaleString(undefined, {month: "short", day: "numeric", hour: "2-digit", minute: "2-digit"}));
  return entry.at_bucket_seconds ? [at, el("span", {class: "quiet small"}, ` within ${duration(entry.at_bucket_seconds)}`)] : at;
}

// ---- the proof of an entry ----

async function prove(sequence) {
  const body = el("div", {class: "proof"}, el("p", {class: "state", role: "status"}, el("span", {class: "pulse", "aria-hidden": "true"}), "Making the proof. The first one after a start builds the tree over all entries."));
  const node = dialog(`Entry ${number(sequence)}`, body);
  let found;
  try { found = await api(`ledger/${sequence}`); } catch (error) { replace(body, el("p", {class: "problem", role: "alert"}, message(error))); return; }
  if (!node.isConnected) return;
  const {proof, check} = found, signed = proof.head.head;
  const text = JSON.stringify(proof, null, 1);
  const link = el("a", {class: "button", href: URL.createObjectURL(new Blob([text], {type: "application/json"})), download: `entry-${sequence}-proof.json`}, "Download the proof");
  node.addEventListener("close", () => URL.revokeObjectURL(link.href));
  replace(body,
    el("p", {class: "sentence", role: "status"}, check.valid ? state("filled", `Valid: the hub signed a head of ${count(signed.size, "entry", "entries")} that this one is under`) : state("struck", `Not valid: ${check.problem}`)),
    section("1. The entry's hash", el("p", {class: "quiet small"}, "sha256 over canonical JSON of body, kind, previous_hash and sequence"),
      facts([["Kind", proof.entry.kind], ["Hash of the entry before", id(proof.entry.previous_hash)], ["Hash", id(proof.entry.hash)]]),
      el("details", {}, el("summary", {}, "Body, canonical"), el("pre", {class: "code"}, found.body))),
    check.is_own_head
      ? section("2. The head has its hash", el("p", {}, "The head was signed right behind this entry, and has its hash."))
      : section("2. From the leaf to the root", el("p", {class: "quiet small"}, "leaf = sha256(00 · hash); each node = sha256(01 · left · right)"),
        el("ol", {class: "path"}, el("li", {}, el("span", {class: "quiet"}, "leaf"), id(check.leaf)),
          check.steps.map((step) => el("li", {}, el("span", {class: "quiet"}, `sibling ${step.side}`), id(step.sibling), el("span", {class: "quiet"}, "node"), id(step.node)))),
        facts([["Root of the head", id(check.root)]])),
    section("3. The signed head", el("p", {class: "quiet small"}, "Ed25519 over canonical JSON of {\"ledger_head\": head}"),
      el("pre", {class: "code"}, JSON.stringify(signed, null, 1)), facts([["Signature", id(proof.head.signature)], ["Public key", id(found.public_key)]])),
    el("div", {class: "row"}, link));
}
