// Duplicate rows of a file: searched here if it is small, otherwise by a job.
import {action, api, commandOf, copyable, count, el, facts, leave, mayChange, message, number, pathUrl, post, replace, table} from "../static/app.js";

const NEAR = [["0.8", "equal, or 80% similar"], ["0.9", "equal, or 90% similar"], ["", "equal"]];

// duplicates(reading) -> {node, begin()}.
export function duplicates(reading) {
  const report = el("div", {class: "stack", "aria-live": "polite"});
  const near = el("select", {id: "near"}, NEAR.map(([value, text]) => el("option", {value}, text)));
  let turn = 0;
  leave(() => { turn = -1; });

  const search = action("Search", async () => {
    const mine = ++turn;
    let start = 0, found = null;
    try {
      do {
        found = await api(`data/duplicates?${new URLSearchParams({...reading(), start, ...(near.value && {near: near.value})})}`);
        if (mine !== turn) return;
        start = found.next;
        replace(report, summary(found));
      } while (start !== null);
    } catch (error) {
      if (error.code !== "too-large") throw error;
      replace(report, el("p", {}, message(error)));
    }
  });
  const write = mayChange() && action("Write a file without them", async () => {
    const mine = ++turn;
    const job = await post("data/dedup", {name: reading().name, near: near.value ? Number(near.value) : null});
    await follow(job, () => mine === turn, report);
  });
  const node = el("section", {}, el("h2", {}, "Duplicates"), el("div", {class: "field"}, el("label", {for: "near"}, "Rows that are"), near), el("div", {class: "row"}, search, write), report);
  return {node, begin: () => { turn++; replace(report); }};
}

function summary(found) {
  const dropped = Object.entries(found.dropped);
  return [
    found.next !== null && el("p", {class: "quiet", role: "status"}, `${count(found.rows, "row")} compared.`),
    found.next === null && !dropped.length && el("p", {}, `${count(found.rows, "row")}, no duplicates.`),
    dropped.length > 0 && facts([["Rows compared", number(found.rows)], ...dropped.map(([reason, count]) => [`${reason}s`, number(count)])]),
    found.duplicates.length > 0 && table([
      {name: "Row", of: (one) => el("span", {}, el("span", {class: "mono small"}, line(one.place)), el("br"), one.similarity === 1 ? "equals " : `${Math.round(100 * one.similarity)}% similar to `, el("span", {class: "mono small"}, line(one.earlier)))},
      {name: "Text", of: (one) => el("span", {class: "small clamp"}, one.text), class: "reason"},
    ], found.duplicates.slice(0, 50), {label: "Duplicates"}),
  ];
}
const line = (place) => place.slice(place.lastIndexOf("/") + 1);

// Show the report of an ended job, which is its last output.
async function follow(job, isWanted, report) {
  const command = commandOf(job);
  while (isWanted()) {
    const now = await api(`jobs/${job.id}`);
    const {text} = await api(`jobs/${job.id}/output?offset=-65536`);
    if (now.status === "running") { replace(report, copyable(command), el("p", {role: "status", class: "quiet"}, text.trim().split("\n").at(-1) || "Started.")); await new Promise((done) => setTimeout(done, 1500)); continue; }
    if (now.exit_code === 0) {
      const rows = (name) => { const found = text.match(new RegExp(`"${name}": (\\d+)`)); return found ? number(Number(found[1])) : null; };
      replace(report, copyable(command), facts([["Rows read", rows("rows_read")], ["Kept", rows("num_rows")], ["Exact duplicates", rows("exact duplicate")], ["Near duplicates", rows("near duplicate")], ["Written to", el("a", {href: `/data/${pathUrl(job.folder)}`}, job.folder)]]));
    } else replace(report, copyable(command), el("pre", {class: "raw"}, text.slice(-2000)), el("p", {class: "problem"}, "The job failed."));
    return;
  }
}
