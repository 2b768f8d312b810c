// The open questions of gym-client join, as the command printed them.
import {action, el, facts, mayChange, section} from "../static/app.js";

let answered = null; // the terms that were accepted last

// questionPanel(question, {job, answer(given), decline}) -> element
export function questionPanel(question, {job, answer, decline}) {
  const before = answered?.event === question.event && answered.job !== job.id && question.lines ? new Set(answered.lines.map(String)) : null;
  const isNew = (line) => before && !before.has(String(line));
  const yes = (text, given) => mayChange() && el("div", {class: "row"},
    action(text, async () => { answered = {event: question.event, job: job.id, lines: question.lines || []}; await answer(given); }, {primary: true}),
    el("button", {type: "button", onclick: decline}, "No"));
  const terms = () => [before && el("p", {class: "problem", role: "alert"}, "The terms changed after your answer. New terms are in bold."),
    el("dl", {class: "facts terms"}, merged(question.lines).map(([label, lines]) => el("div", {}, el("dt", {}, label), el("dd", {}, lines.map((line) => el("p", {}, isNew(line) ? el("strong", {}, line[1]) : line[1]))))))];
  switch (question.event) {
    case "server-key": return section("Is this the hub’s key?", el("p", {}, `${question.address} is new here. Compare its key with what the coordinator published. From now on only this key is accepted.`), el("p", {class: "fingerprint"}, question.fingerprint), yes("It is the right key", {fingerprint: question.fingerprint}));
    case "local-copy": return section("Read your copy of the base model?", el("p", {}, `The hub trains ${question.base_model}. Your local copy, if there is one, is read to work out the terms.`), yes("Read it", {accept: question.accept}));
    case "base-offer": return section("Fetch the base model?", terms(), yes("Fetch it", {accept: question.accept}));
    case "hub-restored": return section("The hub was restored from a backup", facts(Object.entries(question).filter(([name]) => !["event", "at"].includes(name)).map(([name, value]) => [name, typeof value === "object" ? JSON.stringify(value) : String(value)])), yes("Continue with it", {accept_restore: true}));
    default: return section(`The terms of ${question.server} at ${question.address}`, terms(), yes("Join on these terms", {accept: question.accept}));
  }
}

// Lines without a label belong to the previous line, as in the terminal's panel.
function merged(lines) {
  const found = [];
  for (const line of lines) { if (line[0] || !found.length) found.push([line[0], [line]]); else found.at(-1)[1].push(line); }
  return found;
}
