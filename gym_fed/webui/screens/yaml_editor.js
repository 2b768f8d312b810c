// A YAML editor with line numbers, and the problems of a check that runs while the user types.
import {el, leave, message, replace, state} from "../static/app.js";

// editor({label, value, untouched, readonly, check, shown, typed, seek}) -> {node, problems, area, changed(), set(value), goTo(line, column)}.
// check(text) returns {problems, notes}, or null if nothing is checked. A problem with `choose` is an input that must still
// be chosen; it is not shown for the `untouched` text. shown(found) is called with only the newest answer, and typed(text)
// when the user changes the text, here or in the form. seek() scrolls the text into view before a position in it is shown.
export function editor({label, value, untouched = "", readonly = false, check, shown = () => {}, typed = () => {}, seek = () => {}}) {
  const gutter = el("div", {class: "gutter", "aria-hidden": "true"});
  const problems = el("div", {id: "problems", class: "problems", role: "status", "aria-live": "polite"});
  const area = el("textarea", {class: "code", id: "yaml", spellcheck: "false", autocapitalize: "off", autocomplete: "off", wrap: "off", rows: 26, readonly, "aria-label": label, "aria-describedby": "problems", oninput: () => changed(), onscroll: () => { gutter.scrollTop = area.scrollTop; }, onkeydown: indent});
  let timer = 0, turn = 0;
  leave(() => { clearTimeout(timer); turn = -1; });

  function lines(found) {
    const bad = new Set(found.map((one) => one.line));
    replace(gutter, area.value.split("\n").map((_, at) => el("span", {class: bad.has(at + 1) ? "bad" : ""}, String(at + 1))));
    gutter.scrollTop = area.scrollTop;
  }

  function changed(wait = 250) {
    typed(area.value);
    later(wait);
  }

  function later(wait) {
    lines([]);
    clearTimeout(timer);
    timer = setTimeout(run, wait);
  }

  async function run() {
    const mine = ++turn;
    let found;
    try { found = await check(area.value); } catch (error) { if (mine === turn) replace(problems, el("p", {class: "problem"}, error.message)); return; }
    if (mine !== turn || !found) return;
    const wrong = found.problems.filter((one) => !one.choose), open = found.problems.filter((one) => one.choose).map((one) => one.choose);
    area.setAttribute("aria-invalid", wrong.length ? "true" : "false");
    lines(wrong);
    const verdict = wrong.length ? state("struck", wrong.length === 1 ? "One problem" : `${wrong.length} problems`) : open.length ? null : state("filled", "Valid");
    replace(problems, verdict && el("p", {}, verdict),
      open.length > 0 && area.value !== untouched && el("p", {}, state("hollow", `Choose ${open.join(" and ")}`)),
      wrong.length > 0 && el("ul", {class: "problem-list"}, wrong.map((one) => el("li", {},
        one.line ? el("button", {type: "button", class: "place", onclick: () => goTo(one.line, one.column), "aria-label": `Go to line ${one.line}, column ${one.column}`}, `${one.line}:${one.column}`) : el("span"),
        el("span", {}, one.key && el("code", {}, one.key), one.key && " ", one.hint ? message(one) : one.message)))),
      found.notes.map((note) => el("p", {class: "small quiet"}, `Note: ${note}`)));
    shown(found);
  }

  function goTo(line, column) {
    seek();
    const every = area.value.split("\n");
    const start = every.slice(0, line - 1).reduce((sum, one) => sum + one.length + 1, 0) + column - 1;
    area.focus();
    area.setSelectionRange(start, start + Math.max(1, (every[line - 1] || "").slice(column - 1).split(/[:\s]/)[0].length));
    area.scrollTop = Math.max(0, (line - 6) * (area.scrollHeight / Math.max(1, every.length)));
  }

  // Tab indents only after typing, so that Escape, Tab leaves the field.
  function indent(event) {
    if (event.key !== "Tab" || event.shiftKey || event.altKey || event.ctrlKey || event.metaKey || !area.dataset.tab) {
      if (event.key === "Escape") delete area.dataset.tab; else if (event.key.length === 1) area.dataset.tab = "1";
      return;
    }
    event.preventDefault();
    area.setRangeText("  ", area.selectionStart, area.selectionEnd, "end");
    changed();
  }

  area.value = value;
  later(0);
  return {node: el("div", {class: "editor"}, gutter, area), problems, area, changed, goTo, shown: () => { gutter.scrollTop = area.scrollTop; }, set(text) { area.value = text; later(0); }};
}
