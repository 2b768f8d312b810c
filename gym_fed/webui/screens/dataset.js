// A data file: its rows as the model sees them with trained parts highlighted, their lengths, and duplicates.
import {action, api, bytes, columnsText, copyable, count, el, empty, failed, figure, leave, loading, message, namedColumns, number, quoted, remember, replace} from "../static/app.js";
import {duplicates} from "./duplicates.js";
import {lengths} from "./lengths.js";

export const title = "Data";
const PAGE = 10;
const READING = ["model", "format", "columns", "max_length"];
const FILTERS = ["text", "least", "most", "column", "value", "only"];

export async function show(root, {name}, query) {
  let formats = ["auto", ...(query.get("format") ? [query.get("format")] : [])];
  const values = Object.fromEntries([...READING, ...FILTERS, "start"].map((key) => [key, query.get(key) || ""]));
  const reading = () => ({name, ...given(values, READING)});
  const about = el("div", {class: "figures"}), rows = el("div", {class: "rows"}), command = el("div");
  const said = el("p", {class: "quiet small", role: "status"});
  const histogram = lengths(reading, (least, most) => change({least, most, start: ""}));
  const asides = [histogram, duplicates(reading)];
  let turn = 0;
  leave(() => { turn = -1; });

  const change = async (changed) => {
    const again = READING.some((key) => key in changed && changed[key] !== values[key]);
    Object.assign(values, changed);
    remember(values);
    replace(forms, ...draw());
    drawCommand();
    await load();
    if (again) asides.forEach((aside) => aside.begin());
  };

  const load = async () => {
    const mine = ++turn, start = Number(values.start) || 0;
    replace(rows, loading("Loading. Starting the process that reads and tokenises rows takes a few seconds"));
    said.textContent = "";
    let shown = [], next = start, answer = null;
    try {
      while (next !== null && shown.length < PAGE) {
        answer = await api(`data/rows?${new URLSearchParams({...reading(), ...given(values, FILTERS), start: next, limit: PAGE - shown.length})}`);
        if (mine !== turn) return;
        shown = shown.concat(answer.rows);
        if (answer.rows.length) replace(rows, shown.map((row) => rowOf(row, reading)));
        said.textContent = answer.next === null || shown.length === PAGE ? "" : answer.rows_seen < start ? `On the way to row ${number(start + 1)}: ${count(answer.rows_seen, "row")} read.` : `Looking further: ${count(answer.next, "row")} read, ${shown.length} found.`;
        next = answer.next;
      }
    } catch (error) {
      if (mine === turn) replace(rows, failed(error, load));
      return;
    }
    if (answer && answer.formats.length !== formats.length) { formats = answer.formats; replace(forms, ...draw()); }
    if (!shown.length) replace(rows, nothing(start, values, change));
    const known = answer && answer.about_rows;
    replace(about, figure("Rows", known === null ? "?" : number(known), answer && answer.num_rows === null ? "about, by the bytes read" : ""), figure("Format", answer ? answer.format : "?"),
      figure("Shown", shown.length ? `${number(shown[0].number + 1)} to ${number(shown.at(-1).number + 1)}` : "none"));
    replace(pages, ...pager(start, next, change));
    if (answer && answer.choices) rows.prepend(columnChooser(answer.choices, values.columns, change));
  };

  const train = el("p");
  function drawCommand() {
    const wanted = new URLSearchParams({data: name, ...given(values, ["columns", "format"])});
    replace(train, el("a", {class: "button", href: `/train?${wanted}`}, "Train on these rows"));
    replace(command, copyable(shownCommand(reading()), "Copy"));
  }
  const forms = el("div", {class: "stack"}), pages = el("nav", {class: "row", "aria-label": "Pages of rows"});
  const draw = () => [readingForm(values, formats, change), filterForm(values, change)];
  replace(forms, ...draw());
  drawCommand();
  root.append(
    el("header", {}, el("div", {}, el("p", {class: "small"}, el("a", {href: "/data"}, "Data")), el("h1", {class: "wrap"}, name)), el("div", {class: "legend"}, el("span", {class: "lit"}, "trained on"), el("span", {class: "unlit"}, "only read"))),
    about, forms,
    el("div", {class: "beside"}, el("section", {}, el("h2", {}, "Rows"), said, rows, pages), el("aside", {class: "stack"}, asides.map((aside) => aside.node),
      el("section", {}, el("h2", {}, "Train on it"), train), el("section", {}, el("h2", {}, "On the command line"), command))));
  await load();
  asides.forEach((aside) => aside.begin());
}

const given = (values, keys) => Object.fromEntries(keys.filter((key) => values[key] !== "").map((key) => [key, values[key]]));
const shownCommand = ({name, model, format, columns, max_length}) => ["gym data show", quoted(name), model && `--model ${quoted(model)}`, format && `--format ${format}`, columns && `--columns ${quoted(columns)}`, max_length && `--max-length ${max_length}`].filter(Boolean).join(" ");

function readingForm(values, formats, change) {
  const model = input("model", values.model, {placeholder: "gym-nano"});
  const format = el("select", {id: "format", name: "format"}, formats.map((one) => el("option", {value: one, selected: one === (values.format || "auto")}, one)));
  const columns = input("columns", values.columns, {placeholder: "prompt=question,completion=answer", size: 30});
  const length = input("max_length", values.max_length, {type: "number", min: 2, placeholder: "whole"});
  return el("form", {class: "fields", "aria-label": "How rows are read", onsubmit: (event) => {
    event.preventDefault();
    change({model: model.value.trim(), format: format.value === "auto" ? "" : format.value, columns: columns.value.trim(), max_length: length.value, start: ""});
  }}, field("Tokens of model", model), field("Format", format), field("Columns, ours=theirs", columns), field("Cut at tokens", length), el("button", {}, "Apply"));
}

function filterForm(values, change) {
  const text = input("text", values.text, {type: "search"}), least = input("least", values.least, {type: "number", min: 0}), most = input("most", values.most, {type: "number", min: 0});
  const column = input("column", values.column, {placeholder: "source", size: 10}), value = input("value", values.value, {size: 14});
  const only = el("select", {id: "only"}, [["", "all rows"], ["problems", "rows that cannot be used"], ["nothing_learnt", "rows with no tokens to train on"]].map(([key, words]) => el("option", {value: key, selected: key === values.only}, words)));
  const clear = FILTERS.some((key) => values[key] !== "");
  return el("form", {class: "fields", role: "search", "aria-label": "Filter rows", onsubmit: (event) => {
    event.preventDefault();
    change({text: text.value, least: least.value, most: most.value, column: column.value.trim(), value: value.value, only: only.value, start: ""});
  }}, field("Words", text), field("Tokens from", least), field("to", most), field("Column", column), field("has value", value), field("Show", only), el("button", {}, "Filter"),
  clear && el("button", {type: "button", onclick: () => change({...Object.fromEntries(FILTERS.map((key) => [key, ""])), start: ""})}, "Clear"));
}

const input = (id, value, more = {}) => el("input", {id, name: id, value, autocomplete: "off", ...more});
const field = (label, control) => el("div", {class: "field"}, el("label", {for: control.id}, label), control);

function pager(start, next, change) {
  const jump = el("input", {type: "number", min: 1, "aria-label": "Row", placeholder: "row", class: "short"});
  return [
    el("button", {type: "button", disabled: start === 0, onclick: () => change({start: ""})}, "First"),
    el("button", {type: "button", disabled: start === 0, onclick: () => change({start: String(Math.max(0, start - PAGE))})}, "Earlier"),
    el("button", {type: "button", disabled: next === null, onclick: () => change({start: String(next)})}, "Next"),
    el("form", {class: "row", onsubmit: (event) => { event.preventDefault(); if (jump.value) change({start: String(Math.max(0, jump.value - 1))}); }}, jump, el("button", {}, "Go")),
  ];
}

function nothing(start, values, change) {
  if (FILTERS.some((key) => values[key] !== "")) return empty("No rows match these filters.", el("button", {type: "button", onclick: () => change({...Object.fromEntries(FILTERS.map((key) => [key, ""])), start: ""})}, "Clear the filters"));
  return start ? empty("The file ends before this row.", el("button", {type: "button", onclick: () => change({start: ""})}, "Go to the first row")) : empty("The file contains no rows.", el("a", {href: "/data"}, "Choose another"));
}

// Choose the question and answer columns of a file that no format recognises.
export function columnChooser({names, guess}, columns, change) {
  const now = columns ? namedColumns(columns) : guess;
  const chooser = (ours, words) => {
    const control = el("select", {id: `column-${ours}`, name: ours}, el("option", {value: "", selected: !now[ours]}, "none"), names.map((name) => el("option", {value: name, selected: name === now[ours]}, name)));
    return [control, field(words, control)];
  };
  const [question, questionField] = chooser("prompt", "Question"), [answer, answerField] = chooser("completion", "Answer");
  return el("form", {class: "stack hint", "aria-label": "Columns", onsubmit: (event) => {
    event.preventDefault();
    const chosen = {...(question.value && {prompt: question.value}), ...(answer.value && {[question.value ? "completion" : "text"]: answer.value})};
    if (question.value && question.value === answer.value) { answer.setCustomValidity("Choose a column other than the question's."); answer.reportValidity(); return; }
    change({columns: Object.keys(chosen).length ? columnsText(chosen) : "", start: ""});
  }, onchange: () => answer.setCustomValidity("")},
  el("p", {}, columns ? "These columns are read:" : "No known layout has these columns. Which of them are the question and the answer?"),
  el("div", {class: "fields"}, questionField, answerField, el("button", {class: columns ? "" : "primary"}, "Use these columns")));
}

// ---- one row ----

// The location and the number of tokens of a row, above its text.
export const headOf = (row) => el("div", {class: "spread small"}, el("span", {class: "mono quiet"}, row.place), el("span", {class: "quiet"}, row.tokens === null ? bytes(row.bytes) : `${count(row.tokens, "token")}, ${number(row.learnt)} trained on`));

function rowOf(row, reading) {
  const body = el("div", {class: "stack"}, bodyOf(row));
  const whole = action("More of this row", async () => {
    const found = await api(`data/row?${new URLSearchParams({...reading(), start: row.number})}`);
    replace(body, bodyOf(found), el("details", {open: Boolean(row.problem)}, el("summary", {}, "As stored in the file"), el("pre", {class: "raw"}, found.raw || "–")));
    whole.remove();
  });
  return el("article", {class: "datarow", "aria-label": row.place},
    headOf(row),
    body, el("div", {class: "more"}, whole));
}

export function bodyOf(row) {
  if (row.problem) return [el("p", {class: "problem"}, message(row.problem)), row.raw && el("pre", {class: "raw"}, row.raw)];
  return row.sequences.map((sequence) => el("div", {class: "sequence"},
    sequence.name !== "row" && el("h3", {}, `${sequence.name}, ${count(sequence.tokens, "token")}`),
    turnsOf(sequence.parts).map(({role, parts}) => el("div", {class: role ? "turn" : "turn glue"}, el("span", {class: "who"}, role), el("div", {class: "words"}, parts.map((part) => el("span", {class: part.learnt ? "lit" : "unlit"}, part.text))))),
    sequence.more > 0 && el("p", {class: "quiet small"}, count(sequence.more, "more character")),
    sequence.cut > 0 && el("p", {class: "quiet small"}, `cut off at the end: ${count(sequence.cut, "token")}`)));
}

// The parts of one role in a row; text that the chat template adds belongs to the previous turn if it is only spaces.
function turnsOf(parts) {
  const turns = [];
  for (const part of parts) {
    if (!part.role && !part.text.trim()) continue;
    const last = turns.at(-1);
    if (last && last.role === part.role) last.parts.push(part);
    else turns.push({role: part.role, parts: [part]});
  }
  return turns;
}
