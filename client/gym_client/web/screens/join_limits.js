// The limits on when this machine works: hours of the day, and battery. The rest of policy.yaml is not changed.
import {action, el, post, replace, say} from "../static/app.js";

// limitsForm(agent, {saved}) -> element
export function limitsForm({hours = [], on_battery: battery = "train", problem}, {saved}) {
  if (problem) return el("p", {class: "problem"}, `policy.yaml cannot be read: ${problem}`);
  const spans = hours.map((span) => [span.slice(0, 5), span.slice(6)]), rows = el("div", {class: "stack"});
  const time = (at, side, label) => el("input", {type: "time", id: `hours-${at}-${side}`, "aria-label": `${label}, span ${at + 1}`, value: spans[at][side] === "24:00" ? "00:00" : spans[at][side], onchange: (event) => { spans[at][side] = event.target.value; }});
  const draw = () => replace(rows, spans.map((_, at) => el("div", {class: "row"}, el("span", {class: "quiet"}, "from"), time(at, 0, "From"), el("span", {class: "quiet"}, "to"), time(at, 1, "To"),
    el("button", {type: "button", "aria-label": `Remove span ${at + 1}`, onclick: () => { spans.splice(at, 1); draw(); }}, "Remove"))),
  !spans.length && el("p", {class: "quiet"}, "At any time."),
  el("div", {class: "row"}, el("button", {type: "button", onclick: () => { spans.push(["22:00", "07:00"]); draw(); document.getElementById(`hours-${spans.length - 1}-0`).focus(); }}, spans.length ? "Add hours" : "Only at certain hours")));
  const power = el("select", {id: "battery"}, [["train", "train as usual"], ["pause", "wait for mains power"], ["refuse", "end"]].map(([value, text]) => el("option", {value, selected: value === battery}, text)));
  draw();
  return el("div", {class: "doing limits"}, el("p", {class: "small quiet"}, "Rounds begin only in these hours; a round that has begun is finished."), rows,
    el("div", {class: "row"}, el("label", {for: "battery"}, "On battery"), power),
    action("Save", async () => {
      const ends = (span) => (span[1] === "00:00" ? "24:00" : span[1]); // midnight as the end of a day
      await post("join/limits", {hours: spans.map((span) => `${span[0]}-${ends(span)}`), on_battery: power.value});
      say("Saved; a running agent reads it within seconds");
      await saved();
    }, {primary: true}));
}
