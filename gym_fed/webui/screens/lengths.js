// The lengths of a file's rows in tokens, counted part by part, so that a large file shows a result at once.
import {action, api, count, el, facts, failed, leave, message, number, replace} from "../static/app.js";

const FIRST = 2000;
const BINS = 12;

// lengths(reading, choose) -> {node, begin()}; choose(least, most) is called when a bar is clicked.
export function lengths(reading, choose) {
  const body = el("div", {class: "stack"}), said = el("p", {class: "quiet small", role: "status"});
  const node = el("section", {}, el("h2", {}, "Lengths in tokens"), said, body);
  let turn = 0;
  leave(() => { turn = -1; });

  async function count(sums, mine, limit) {
    try {
      while (sums.next !== null && sums.lengths.length < limit) {
        const found = await api(`data/lengths?${new URLSearchParams({...reading(), start: sums.next})}`);
        if (mine !== turn) return;
        sums.lengths = sums.lengths.concat(found.lengths);
        for (const key of ["rows", "learnt", "seen", "cut", "nothing_to_learn", "unusable", "large"]) sums[key] += found[key];
        sums.problems = sums.problems.concat(found.problems).slice(0, 3);
        sums.next = found.next;
        draw(sums, mine);
      }
    } catch (error) {
      if (mine === turn) replace(body, failed(error, begin));
      return;
    }
    draw(sums, mine);
  }

  function draw(sums, mine) {
    const read = sums.rows + sums.unusable + sums.large;
    said.textContent = sums.next === null ? `All: ${count(read, "row")}.` : `So far: ${count(read, "row")}.`;
    const sorted = [...sums.lengths].sort((a, b) => a - b), total = sorted.reduce((sum, length) => sum + length, 0);
    replace(body, bars(sorted, choose), sorted.length > 0 && facts([
      ["Tokens", number(total)], ["Mean", (total / sorted.length).toFixed(1)], ["95% within", number(sorted[Math.ceil(0.95 * sorted.length) - 1])], ["Longest", number(sorted.at(-1))],
      ["Trained on", `${(100 * sums.learnt / Math.max(1, sums.seen)).toFixed(1)}% of the tokens`],
      sums.cut && ["Cut", count(sums.cut, "sequence")], sums.nothing_to_learn && ["No tokens to train on", count(sums.nothing_to_learn, "sequence")],
      sums.large && ["Not counted", `${count(sums.large, "row")} of more than 1 MiB`], sums.unusable && ["Cannot be used", count(sums.unusable, "row")]]),
    sums.problems.length > 0 && el("ul", {class: "small"}, sums.problems.map((problem) => el("li", {}, message(problem)))),
    sums.next !== null && action("Count all rows", () => count(sums, mine, Infinity)));
  }

  const begin = () => {
    const sums = {lengths: [], rows: 0, learnt: 0, seen: 0, cut: 0, nothing_to_learn: 0, unusable: 0, large: 0, problems: [], next: 0};
    said.textContent = "Counting";
    replace(body);
    return count(sums, ++turn, FIRST);
  };
  return {node, begin};
}

// A bar for each range of equal width up to the 99th percentile, and one for the rest.
function bars(sorted, choose) {
  if (!sorted.length) return el("p", {class: "quiet"}, "No rows have a length.");
  const most = sorted[Math.ceil(0.99 * sorted.length) - 1], width = nice(most / BINS), counts = [];
  for (const length of sorted) { const at = Math.min(Math.floor(length / width), Math.ceil((most + 1) / width)); counts[at] = (counts[at] || 0) + 1; }
  const top = Math.max(...counts.filter(Boolean));
  return el("ol", {class: "histogram"}, Array.from(counts, (count, at) => {
    const isLast = at * width > most, text = isLast ? `${at * width} and more` : `${at * width} to ${(at + 1) * width - 1}`;
    const fill = el("span", {class: "fill"});
    fill.style.width = `${100 * (count || 0) / top}%`;
    return el("li", {}, el("button", {type: "button", title: "Show these rows", onclick: () => choose(String(at * width), isLast ? "" : String((at + 1) * width - 1))}, text), el("span", {class: "track"}, fill), el("span", {class: "count"}, number(count || 0)));
  }));
}

function nice(width) {
  const power = 10 ** Math.floor(Math.log10(Math.max(1, width)));
  return Math.max(1, [1, 2, 5, 10].find((step) => step * power >= width) * power);
}
