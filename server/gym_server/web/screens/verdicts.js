// What the screens of rounds share: shapes of states and verdicts, counts in words.
import {el, state} from "/static/app.js";

const SHAPES = {merged: "filled", committed: "filled", admitted: "half", collecting: "half", merging: "half", rejected: "struck", refused: "struck"};

export const shown = (word) => state(SHAPES[word] || "hollow", word);

export const counted = (verdicts) => Object.entries(verdicts).sort().map(([verdict, count]) => `${count} ${verdict}`).join(", ");

export const contributor = (id, name) => (id ? el("a", {href: `/contributors/${id}`}, name || id) : name);

export function change(before, after) {
  if (before === null || after === null || before === undefined || after === undefined) return null;
  const difference = after - before;
  return `${difference > 0 ? "+" : "−"}${Math.abs(difference).toFixed(4)}`;
}
