// All keys of a run by group; each field changes its value in the YAML in place.
import {el, marked, mayChange, message, replace, say} from "../static/app.js";

// keysPanel({form, area, set(values), append(line), goTo(line, column)}) -> {node, draw(checked)}.
export function keysPanel({form, area, set, append, goTo}) {
  const fields = form.groups.flatMap((group) => group.fields), holder = el("div", {class: "form"});
  const search = el("input", {type: "search", id: "find-key", placeholder: "Find a key", "aria-label": "Find a key", oninput: () => draw(checked)});
  let checked = null;

  async function change(field, value, input) {
    try {
      await set({[field.key]: value});
      input.removeAttribute("aria-invalid");
    } catch (error) {
      input.setAttribute("aria-invalid", "true");
      say(message(error));
    }
  }

  function input(field, id) {
    const value = checked?.given?.[field.key];
    const isGiven = value !== undefined && value !== null;
    const off = !mayChange();
    const chosen = checked?.chosen?.find((one) => one.key === field.key);
    const standard = chosen ? chosen.value : field.default ?? null;
    if (field.kind === "yaml") return el("button", {type: "button", id, onclick: () => toKey(field.key)}, isGiven ? `line ${lineOf(field.key)}` : "in the text");
    if (field.kind === "choice" || field.kind === "boolean") {
      const choices = field.kind === "boolean" ? [true, false] : field.choices;
      const none = standard === null ? "–" : `${standard} (default)`;
      return el("select", {id, disabled: off, class: isGiven ? "given" : "", onchange: (event) => change(field, event.target.value === "" ? null : choices[Number(event.target.value)], event.target)},
        el("option", {value: ""}, none), choices.map((choice, at) => el("option", {value: at, selected: isGiven && choice === value}, String(choice))));
    }
    const isNumber = field.kind === "integer" || field.kind === "number";
    return el("input", {id, disabled: off, type: "text", inputmode: isNumber ? "decimal" : "text", class: `${isGiven ? "given" : ""} ${isNumber ? "number" : ""}`, value: isGiven ? String(value) : "", placeholder: standard === null ? "" : String(standard), title: chosen?.reason ?? "", onchange: (event) => {
      const typed = event.target.value.trim();
      if (typed === "") { change(field, null, event.target); return; }
      const parsed = isNumber ? Number(typed) : typed;
      if (isNumber && !Number.isFinite(parsed)) { event.target.setAttribute("aria-invalid", "true"); say(`${field.key}: ${typed} is not a number.`); return; }
      change(field, parsed, event.target);
    }});
  }

  const lineOf = (key) => { const at = area.value.split("\n").findIndex((line) => line.trimStart().replace(/^- /, "").startsWith(`${key.split(".").pop()}:`)); return at < 0 ? 0 : at + 1; };
  function toKey(key) {
    const line = lineOf(key), [head, inner] = key.split(".");
    if (line) goTo(line, 1);
    else if (mayChange()) append(`${area.value.endsWith("\n") || !area.value ? "" : "\n"}${head}:${inner ? `\n  ${inner}: ` : " "}`);
  }

  function row(field) {
    const id = `key-${field.key.replaceAll(".", "-")}`;
    return el("div", {class: "field key"}, el("label", {for: id}, field.key), input(field, id), field.help && el("p", {class: "help"}, marked(field.help)));
  }

  // Sections of other algorithms or tuning methods are hidden unless they match the search.
  function belongs(field) {
    if (!field.section) return true;
    const values = checked?.given || {};
    if (form.algorithms.includes(field.section)) return field.section === (values.algorithm || "sft");
    if (form.tuning.includes(field.section)) return field.section === (values.finetuning || "full");
    return true;
  }

  const opened = new Set();
  function draw(found) {
    checked = found;
    const focused = document.activeElement?.id, words = search.value.trim().toLowerCase();
    if (words) {
      const found = fields.filter((field) => field.key.includes(words) || field.help.toLowerCase().includes(words)).sort((one, other) => other.key.includes(words) - one.key.includes(words)).slice(0, 30);
      replace(holder, found.length ? found.map(row) : el("p", {class: "quiet"}, `No keys match “${search.value}”.`));
    } else {
      const first = form.first.map((key) => fields.find((field) => field.key === key)).filter(Boolean);
      replace(holder, first.map(row), form.groups.map((group) => {
        const own = group.fields.filter((field) => !form.first.includes(field.key) && belongs(field));
        if (!own.length) return null;
        const count = own.filter((field) => checked?.given?.[field.key] !== undefined).length;
        const inside = el("div", {class: "form inner"});
        const filled = () => { if (!inside.firstChild) inside.append(...sections(own)); };
        if (opened.has(group.title)) filled();
        return el("details", {open: opened.has(group.title), ontoggle: (event) => { if (event.target.open) { opened.add(group.title); filled(); } else opened.delete(group.title); }},
          el("summary", {}, group.title, count > 0 && el("span", {class: "count"}, ` ${count} set`)), inside);
      }));
    }
    if (focused?.startsWith("key-")) document.getElementById(focused)?.focus();
  }

  function sections(own) {
    const nodes = [];
    let section = "";
    for (const field of own) {
      if (field.section && field.section !== section) nodes.push(el("h3", {class: "section-name"}, field.section), field.section_help && el("p", {class: "help small quiet"}, marked(field.section_help)));
      section = field.section || "";
      nodes.push(row(field));
    }
    return nodes.filter(Boolean);
  }

  return {node: el("div", {class: "stack"}, el("div", {class: "row"}, search), holder), draw};
}
