// An answer's Markdown as elements: paragraphs, headings, lists, quotes, code, emphasis and links. HTML stays text.
import {copyable, el} from "../static/app.js";

const MOST = 200_000; // characters; a longer answer is shown as it came
const LINK = /^https?:\/\/[^\s]+$/i;

export function markdown(text) {
  if (text.length > MOST) return [el("p", {class: "said"}, text)];
  const lines = text.replaceAll("\r", "").split("\n"), nodes = [];
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
    const kind = kindOf(line);
    let to = at + 1;
    while (to < lines.length && lines[to].trim() && continues(kind, lines[to])) to++;
    nodes.push(block(kind, lines.slice(at, to)));
    at = to;
  }
  return nodes;
}

const ITEM = {ul: /^\s*[-*+]\s+/, ol: /^\s*\d{1,9}[.)]\s+/, quote: /^\s*>\s?/, heading: /^ {0,3}#{1,6}\s+/};
const kindOf = (line) => Object.keys(ITEM).find((kind) => ITEM[kind].test(line)) || (/^ {0,3}(```+|~~~+)/.test(line) ? "fence" : "p");
// A line goes on with the block before it: an item of the same list, or text; a heading is one line.
const continues = (kind, line) => kind !== "heading" && (kindOf(line) === kind || (kindOf(line) === "p" && kind !== "heading"));

function block(kind, lines) {
  if (kind === "heading") return el("p", {class: "md-heading", role: "heading", "aria-level": 4}, spans(lines[0].replace(ITEM.heading, "")));
  if (kind === "quote") return el("blockquote", {}, spans(lines.map((line) => line.replace(ITEM.quote, "")).join("\n")));
  if (kind === "p") return el("p", {class: "said"}, spans(lines.join("\n")));
  const items = [];
  for (const line of lines) if (ITEM[kind].test(line)) items.push(line.replace(ITEM[kind], "")); else items.push(`${items.pop()}\n${line.trim()}`);
  const first = kind === "ol" ? Number(/\d+/.exec(lines[0])[0]) : null;
  return el(kind, {class: "md-list", start: first}, items.map((item) => el("li", {}, spans(item))));
}

// Code first, since nothing in it is marked; then links, strong and emphasised text. Each pattern is linear: a run of backticks is tried once, as a whole.
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
