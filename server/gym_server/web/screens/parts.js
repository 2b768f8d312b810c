// Shared parts of the hub's screens: paged lists, reloading on events, a confirmation dialog, verdicts and verdict strips.
import {action, el, leave, number, on, signed} from "../static/app.js";

// Reloads soon after an event of one of these kinds; several events cause one reload.
export function refreshOn(kinds, load) {
  let waiting = null;
  const soon = () => { if (waiting === null) waiting = setTimeout(() => { waiting = null; Promise.resolve(load()).catch(() => {}); }, 500); };
  for (const kind of kinds) on(kind, soon);
  leave(() => clearTimeout(waiting));
}

export function pager({offset, limit, total, turn, label}) {
  if (total <= limit) return null;
  const last = Math.min(total, offset + limit);
  return el("nav", {class: "row pager", "aria-label": label},
    el("span", {class: "quiet small"}, `${number(offset + 1)} to ${number(last)} of ${number(total)}`),
    el("button", {type: "button", disabled: offset === 0, onclick: () => turn(Math.max(0, offset - limit))}, "Previous"),
    el("button", {type: "button", disabled: last >= total, onclick: () => turn(offset + limit)}, "Next"));
}

export function dialog(title, ...children) {
  const close = el("button", {type: "button", onclick: () => node.close()}, "Close");
  const node = el("dialog", {"aria-label": title, onclose: () => node.remove()}, el("div", {class: "spread"}, el("h2", {}, title), close), children);
  document.body.append(node);
  leave(() => node.remove());
  node.showModal();
  return node;
}

// Formats a signed figure with its standard error, if known.
export function withError(value, error) {
  if (value === null || value === undefined) return null;
  return error === null || error === undefined ? signed(value) : `${signed(value)} ± ${number(error, 4)}`;
}

// Asks for one line of text before an action: ask("Revoke", "Why it is revoked", {label, button, run}).
export function ask(title, text, {label, button, run, help = ""}) {
  const field = el("input", {id: "asked", type: "text", required: true, maxlength: 500, autocomplete: "off"});
  const form = el("form", {class: "ask", onsubmit: (event) => { event.preventDefault(); form.querySelector("button.primary").click(); }},
    el("p", {}, text),
    el("div", {class: "field"}, el("label", {for: "asked"}, label), field, help && el("span", {class: "help"}, help)),
    action(button, async () => {
      if (!field.reportValidity()) return;
      await run(field.value.trim());
      node.close();
    }, {primary: true}));
  const node = dialog(title, form);
  field.focus();
}

// ---- verdicts ----

const SHAPES = [["merged", "merged"], ["duplicate", "same work as a merged update"], ["admitted", "waits for its merge"], ["rejected", "rejected at the merge"], ["refused", "refused at admission"], ["aborted", "round without a version"], ["absent", "no update"]];

// One mark per round, oldest first: strip(verdicts, newest round, number of rounds).
export function strip(verdicts, newest, rounds) {
  const known = new Map(verdicts.map((one) => [one.server_round, one]));
  const counts = {}, marks = [];
  for (let round = Math.max(1, newest - rounds + 1); round <= newest; round++) {
    const one = known.get(round), verdict = one ? one.verdict : "absent";
    counts[verdict] = (counts[verdict] || 0) + 1;
    marks.push(el("i", {class: verdict, title: one ? `Round ${round}: ${verdict}${one.reason ? `, ${one.reason}` : ""}` : `Round ${round}: no update`}));
  }
  const said = SHAPES.filter(([kind]) => counts[kind]).map(([kind, text]) => `${counts[kind]} ${text}`).join(", ");
  return el("span", {class: "strip", role: "img", "aria-label": said || "no rounds yet"}, marks);
}

export const stripLegend = () => el("ul", {class: "strip-legend", "aria-label": "Shapes of verdicts"},
  SHAPES.map(([kind, text]) => el("li", {}, el("span", {class: "strip", "aria-hidden": "true"}, el("i", {class: kind})), text)));

// A link to a contributor, or only the name if there is no account. The name's direction does not change that of other text.
export const person = (id, name) => (id ? el("a", {href: `/contributors/${encodeURIComponent(id)}`, title: id}, el("bdi", {}, name || id)) : el("bdi", {}, name));

// Why a chart of the held-out loss has no point yet.
export const noLoss = (isMeasured) => (isMeasured ? "The first points, of the base model and of version 1, come with the first merge." : "Not measured: this hub has no held-out rows (gate.heldout).");

// The contributors of a version's merged updates.
export const helpers = ({merged_from: from, num_updates: total}) => (from.length ? el("span", {}, from.map((one, at) => [at > 0 && ", ", person(one.contributor, one.name)]), total > from.length && ` and ${number(total - from.length)} more`) : null);

export const counted = (verdicts) => Object.entries(verdicts).sort().map(([verdict, count]) => `${count} ${verdict}`).join(", ");

const isKnown = (loss) => loss !== null && loss !== undefined;
export const change = (before, after) => (isKnown(before) && isKnown(after) ? signed(after - before) : null);
