// Convert an answer's Markdown to elements: paragraphs, headings, nested lists, tables, quotes, code, emphasis and links. HTML stays text.
import {copyable, el} from "../static/app.js";

const MOST = 200_000; // characters; a longer answer is shown as plain text
const LINK = /^https?:\/\/[^\s]+$/i;

export function markdown(text) {
  if (text.length > MOST) return [el("p", {class: "said"}, text)];
  const lines = text.replaceAll("\r", "").split("\n"), nodes = [];
  let cellsLeft = MOST_CELLS;
  for (let at = 0; at < lines.length;) {
    const line = lines[at], fence = /^ {0,3}(```+|~~~+)\s*([\w+#.-]*)/.exec(line);
    if (fence) {
      let to = at + 1;
      while (to < lines.length && lines[to].trim() !== fence[1]) to++;
      nodes.push(el("div", {class: "code-block", "aria-label": fence[2] || "code"}, copyable(lines.slice(at + 1, to).join("\n"))));
      at = to + 1;
      continue;
    }
    if (!line.trim()) { at++; continue; }
    if (RULE.test(line)) { nodes.push(el("hr")); at++; continue; }
    if (line.includes("|") && DIVIDER.test(lines[at + 1] || "") && (lines[at + 1] || "").includes("-")) {
      let to = at + 2;
      while (to < lines.length && lines[to].includes("|")) to++;
      cellsLeft -= cells(line).length * (to - at);
      nodes.push(cellsLeft < 0 ? el("p", {class: "said"}, lines.slice(at, to).join("\n")) : tableOf(line, lines.slice(at + 2, to)));
      at = to;
      continue;
    }
    const kind = kindOf(line);
    let to = at + 1;
    while (to < lines.length && lines[to].trim() && continues(kind, lines[to])) to++;
    nodes.push(block(kind, lines.slice(at, to)));
    at = to;
  }
  return nodes;
}

const RULE = /^ {0,3}(?:(?:\* *){3,}|(?:- *){3,}|(?:_ *){3,})$/;
const DIVIDER = /^[ |:-]+$/;
const MOST_COLUMNS = 50, MOST_DEPTH = 8;
const MOST_CELLS = 20_000; // in all tables of an answer, since a short row has as many cells as its header; further tables stay text
const cells = (line) => line.trim().replace(/^\|/, "").replace(/\|$/, "").split("|", MOST_COLUMNS).map((cell) => cell.trim());

function tableOf(head, rows) {
  const names = cells(head);
  return el("div", {class: "scroll", tabindex: "0", role: "region", "aria-label": "Table"}, el("table", {}, el("thead", {}, el("tr", {}, names.map((name) => el("th", {scope: "col"}, spans(name))))),
    el("tbody", {}, rows.map(cells).map((row) => el("tr", {}, names.map((_, at) => el("td", {}, spans(row[at] || ""))))))));
}

// Nest items by indentation: an item that is indented more than the previous one starts a list inside it.
function listOf(lines) {
  const root = {indent: -1, inner: []}, open = [root];
  for (const line of lines) {
    const found = /^(\s*)(?:[-*+]|(\d{1,9})[.)])\s+/.exec(line);
    if (!found) { open.at(-1).text += `\n${line.trim()}`; continue; }
    const item = {indent: found[1].length, number: found[2] === undefined ? null : Number(found[2]), text: line.slice(found[0].length), inner: []};
    while (open.length > 1 && (item.indent <= open.at(-1).indent || open.length > MOST_DEPTH)) open.pop();
    open.at(-1).inner.push(item);
    open.push(item);
  }
  return drawList(root.inner);
}

function drawList(items) {
  const {number} = items[0];
  return el(number === null ? "ul" : "ol", {class: "md-list", start: number}, items.map(({text, inner}) => el("li", {}, inner.length ? [...spans(text), drawList(inner)] : spans(text))));
}

const ITEM = {ul: /^\s*[-*+]\s+/, ol: /^\s*\d{1,9}[.)]\s+/, quote: /^\s*>\s?/, heading: /^ {0,3}#{1,6}\s+/};
const kindOf = (line) => Object.keys(ITEM).find((kind) => ITEM[kind].test(line)) || (/^ {0,3}(```+|~~~+)/.test(line) ? "fence" : "p");
const isList = (kind) => kind === "ul" || kind === "ol";
// Whether a line continues the previous block, as a list item or text; a heading is a single line.
const continues = (kind, line) => {
  const next = kindOf(line);
  return kind !== "heading" && !RULE.test(line) && (next === kind || next === "p" || (isList(kind) && isList(next) && /^\s/.test(line)));
};

function block(kind, lines) {
  if (kind === "heading") return el("p", {class: "md-heading", role: "heading", "aria-level": 4}, spans(lines[0].replace(ITEM.heading, "")));
  if (kind === "quote") return el("blockquote", {}, spans(lines.map((line) => line.replace(ITEM.quote, "")).join("\n")));
  if (kind === "p") return el("p", {class: "said"}, spans(lines.join("\n")));
  return listOf(lines);
}

// Code first, since its content is literal; then links, strong and emphasised text. Each pattern takes linear time: a run of backticks is tried once, as a whole.
const SPAN = /(?<!`)(`{1,20})(?!`)([^`]+)\1(?!`)|\[([^\][\n]{1,300})\]\(([^\s()]{1,2000})\)|\*\*([^*\n]+)\*\*|\*([^*\s][^*\n]*)\*/g;
function spans(text) {
  const nodes = [];
  let from = 0;
  for (const found of text.matchAll(SPAN)) {
    const [whole, , code, label, url, strong, soft] = found;
    nodes.push(text.slice(from, found.index));
    if (code !== undefined) nodes.push(el("code", {}, code));
    else if (strong !== undefined) nodes.push(el("strong", {}, strong));
    else if (soft !== undefined) nodes.push(el("em", {}, soft));
    else if (LINK.test(url)) nodes.push(el("a", {href: url, target: "_blank", rel: "noopener noreferrer", title: url}, label), ` (${hostOf(url)})`); // a label cannot hide where it leads
    else nodes.push(whole);
    from = found.index + whole.length;
  }
  return [...nodes, text.slice(from)];
}

function hostOf(url) { try { return new URL(url).host; } catch { return url; } }
