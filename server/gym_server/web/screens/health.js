// The health screen: the hub's process, disk, queue and refusals.
import {api, bytes, copyable, count, duration, el, facts, figure, leave, loading, number, outcome, progress, replace, section, siteUrl, state, table, when} from "../static/app.js";

export const title = "Health";
const SECONDS = 5;

export async function show(root) {
  const figures = el("div", {class: "figures"}), body = el("div", {class: "screen"}, loading()), head = el("div", {class: "row", role: "status"});

  async function load() {
    const found = await api("health");
    const people = Object.values(found.accounts).reduce((sum, count) => sum + count, 0);
    replace(head, found.is_running ? state("filled", "running") : [state("hollow", "read from its folder"), el("span", {class: "quiet"}, "rounds run elsewhere, or not at all")]);
    replace(figures,
      figure(found.is_running ? "Up for" : "Dashboard up for", duration(Date.now() / 1000 - found.started_at), when(found.started_at)),
      figure("Version", found.version),
      figure("Round", number(found.server_round), found.round_state),
      figure("Connected", number(found.connected), `of ${count(people, "account")}`),
      found.traffic && figure("Connections", number(found.traffic.connections)),
      found.traffic && figure("Calls", number(total(found.traffic.calls)), `${number(total(found.traffic.refusals))} refused`),
      figure("Ledger", number(found.ledger_entries), "entries"));
    replace(body,
      found.pause && el("p", {class: "problem"}, `${found.pause}. No round begins until gym-server resume.`),
      found.paused && el("p", {class: "problem"}, `${count(found.paused.failures, "round")} in a row made no version: ${found.paused.reason}. The next begins at ${when(found.paused.until)}.`),
      found.is_operator && el("div", {class: "columns"}, disk(found), section("Queue", counts(found.queue, "State", "Messages", "No messages are waiting."))),
      el("div", {class: "columns"},
        found.traffic && section("Refused calls, by code", counts(found.traffic.refusals, "Code", "Calls", "No call was refused since the start.")),
        section(`Updates of the last ${count(found.recent_rounds, "round")}`, found.verdicts
          ? table([{name: "Verdict", of: (one) => outcome(one.verdict)}, {name: "Code", of: (one) => one.code}, {name: "Updates", number: true, of: (one) => number(one.number)}], found.verdicts, {label: "Verdicts", none: "No update has come yet."})
          : el("p", {class: "quiet"}, "Rounds of this hub are private: only an operator sees refusals and their reasons."))),
      found.traffic && el("details", {}, el("summary", {}, "Calls by method"), counts(found.traffic.calls, "Method", "Calls", "No calls yet.")),
      section("Monitoring", el("p", {class: "quiet"}, "Prometheus reads the same figures, with a key of the dashboard:"), copyable(`curl -H "Authorization: Bearer KEY" ${siteUrl("/metrics")}`),
        !found.is_operator && el("p", {class: "quiet"}, "Disk, queue, calls and connections are shown to an operator.")));
  }

  root.append(el("header", {}, el("h1", {}, "Health"), head), figures, body);
  await load();
  const timer = setInterval(() => { if (!document.hidden && !body.contains(document.activeElement)) load().catch(() => {}); }, SECONDS * 1000);
  leave(() => clearInterval(timer));
}

const total = (found) => Object.values(found).reduce((sum, count) => sum + count, 0);

const counts = (found, name, what, none) => table([{name, of: ([key]) => key}, {name: what, number: true, of: ([, count]) => number(count)}], Object.entries(found).sort((a, b) => b[1] - a[1]), {label: name, none});

function disk({disk: found, stored}) {
  const used = found.total_bytes - found.free_bytes;
  return section("Disk", progress(used, found.total_bytes, `${bytes(used)} of ${bytes(found.total_bytes)} are used`), facts([
    ["Free", `${bytes(found.free_bytes)} of ${bytes(found.total_bytes)}`],
    ["Database", found.database_bytes === null ? "on a server" : bytes(found.database_bytes)],
    ["Objects", `${number(stored.objects)}, ${bytes(stored.bytes)}`],
    ["Uploads without an update", number(stored.uploads)]]));
}
