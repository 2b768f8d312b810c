// A value with its interval on a line with fixed ends, for a table.
import {el} from "../static/app.js";

export function whisker(value, lower, upper, low, high, {zero = false} = {}) {
  const width = 140, at = (x) => (4 + (width - 8) * Math.min(1, Math.max(0, (x - low) / (high - low || 1)))).toFixed(1);
  return el("svg", {width, height: 18, class: "whisker", role: "img", "aria-label": `${value.toFixed(4)}, from ${lower.toFixed(4)} to ${upper.toFixed(4)}`},
    el("line", {x1: 0, x2: width, y1: 9, y2: 9, class: "axis"}),
    zero && el("line", {x1: at(0), x2: at(0), y1: 2, y2: 16, class: "axis"}),
    el("line", {x1: at(lower), x2: at(upper), y1: 9, y2: 9, stroke: "currentColor", "stroke-width": 2}),
    el("circle", {cx: at(value), cy: 9, r: 3.5, fill: "currentColor"}));
}
