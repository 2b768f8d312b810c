// The round screen: the verdict on every update, the effect on the model, the recipe, and the replay command.
import {api, bytes, copyable, duration, el, empty, facts, figure, leave, number, on, outcome, replace, section, short, signed, table, when} from "../static/app.js";
import {change, counted, pager, person, withError} from "./parts.js";

export const title = "Round";
const PAGE = 200;

export async function show(root, {round}) {
  let offset = 0, waiting = null, isOver = false;

  async function load() {
    const found = await api(`rounds/${encodeURIComponent(round)}?limit=${PAGE}&offset=${offset}`);
    isOver = found.state === "committed" || found.state === "aborted";
    replace(root, head(found), numbers(found), verdicts(found), found.set_aside.length > 0 && aside(found), found.replay && replay(found), recipe(found));
  }

  function verdicts(found) {
    const columns = [
      {name: "Contributor", of: (one) => person(one.contributor, one.name)},
      {name: "Verdict", of: (one) => outcome(one.verdict)},
      {name: "Task of round", number: true, of: (one) => number(one.task_round)},
      {name: "Norm", number: true, of: (one) => number(one.norm, 3)},
      {name: "Held-out change", number: true, of: (one) => signed(one.heldout_change)},
      {name: "Score", number: true, of: (one) => withError(one.score, one.error)},
      {name: "Credits", number: true, of: (one) => number(one.credit)},
      {name: "Sent", number: true, of: (one) => bytes(one.bytes)},
      {name: "Reason", class: "reason", of: (one) => one.reason},
    ].filter((column) => !found.is_sealed || ["Contributor", "Verdict", "Credits"].includes(column.name))
      .filter((column) => column.name !== "Task of round" || found.updates.some((one) => one.task_round && one.task_round !== found.server_round));
    const pages = pager({offset, limit: PAGE, total: found.total, turn: (to) => { offset = to; load(); }, label: "Pages of updates"});
    return section("Updates",
      found.is_sealed && el("p", {class: "quiet"}, "Rounds of this hub are private. An operator sees refusals, norms and reasons."),
      found.total ? table(columns, found.updates, {label: "Updates of the round"}) : empty(isOver ? "No update was sent in this round." : "No updates yet."), pages);
  }

  await load();
  const changed = () => { if (!isOver && waiting === null) waiting = setTimeout(() => { waiting = null; load(); }, 1000); };
  on("verdict", ({body}) => { if (String(body.server_round) === round) changed(); });
  on("version", ({body}) => { if (String(body.server_round) === round) changed(); });
  on("snapshot", (now) => { if (String(now.server_round) === round) changed(); });
  leave(() => clearTimeout(waiting));
}

function head(found) {
  const neighbour = (at, text) => el("a", {href: `/rounds/${at}`, class: "button"}, text);
  return el("header", {},
    el("div", {class: "row"}, el("h1", {}, `Round ${found.server_round}`), outcome(found.state), found.version && el("span", {class: "quiet"}, `created version ${found.version}`)),
    el("nav", {class: "row", "aria-label": "Other rounds"},
      found.server_round > 1 && neighbour(found.server_round - 1, "Round before"),
      found.server_round < found.latest && neighbour(found.server_round + 1, "Next round")),
    found.reason && el("p", {}, found.reason));
}

function numbers(found) {
  return el("div", {class: "figures"},
    figure("Held-out loss", number(found.heldout_after), found.heldout_before === null ? "not measured" : `before ${number(found.heldout_before)}`),
    figure("Change", change(found.heldout_before, found.heldout_after)),
    figure("Merged", found.num_updates, counted(found.verdicts)),
    figure("Soup", bytes(found.soup_bytes)),
    figure("Took", found.closed_at && found.opened_at ? duration(found.closed_at - found.opened_at) : null, when(found.opened_at) || ""));
}

function aside(found) {
  return section("Set aside", el("p", {class: "quiet"}, "Replies that could not be read. They earn no credits."), table([
    {name: "Contributor", of: (one) => person(one.contributor, one.name)}, {name: "Reason", class: "reason", of: (one) => one.reason},
  ], found.set_aside, {label: "Replies that were set aside"}));
}

function replay(found) {
  return section("Replay it", el("p", {class: "quiet"}, "Merges the stored updates again and compares the result with the ledger."),
    copyable(found.replay), found.digest && facts([["Version digest", short(found.digest, 71)]]));
}

function recipe(found) {
  const isGroup = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
  const lines = ([name, value]) => (isGroup(value) ? Object.entries(value).flatMap(([key, one]) => lines([`${name}.${key}`, one])) : [[name, typeof value === "object" ? JSON.stringify(value) : String(value)]]);
  const pairs = Object.entries(found.recipe).flatMap(lines);
  return section("Recipe", pairs.length ? el("div", {class: "many"}, facts([["starts from version", String(found.base_height)], found.codec && ["codec of updates", found.codec], ...pairs])) : empty("The task is fixed when contributors are asked."));
}
