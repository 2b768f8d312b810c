// Parallel coordinates and slice plots of trials. The best trial is drawn bold, the others light.
import {el, number} from "../static/app.js";
import {valueOf} from "./tune.js";

// A position from 0 to 1 for each value of a key, on a logarithmic scale if the search samples it so.
function axis(key, range, trials) {
  const values = trials.map((trial) => trial.parameters[key]);
  if (!range || Array.isArray(range.choices) || values.some((value) => typeof value !== "number")) {
    const kinds = [...new Set([...(range?.choices || []), ...values].map(valueOf))];
    return {place: (value) => (kinds.length > 1 ? kinds.indexOf(valueOf(value)) / (kinds.length - 1) : 0.5), ends: [kinds[0], kinds.at(-1)], ticks: kinds};
  }
  const scale = range.log ? Math.log : (value) => value, low = scale(range.low ?? Math.min(...values)), high = scale(range.high ?? Math.max(...values));
  return {place: (value) => (high > low ? (scale(value) - low) / (high - low) : 0.5), ends: [valueOf(range.low), valueOf(range.high)], ticks: []};
}

function figureAxis(trials) {
  const values = trials.map((trial) => trial.value), low = Math.min(...values), high = Math.max(...values);
  return {place: (value) => (high > low ? (value - low) / (high - low) : 0.5), ends: [number(low, 4), number(high, 4)], ticks: []};
}

const isBest = (trial, found) => found.best && trial.number === found.best.number;

export function parallel(keys, trials, found) {
  const width = 1000, height = 220, top = 30, bottom = 26;
  const axes = [...keys.map((key) => ({name: key, of: (trial) => trial.parameters[key], ...axis(key, found.parameters[key], trials)})), {name: found.metric, of: (trial) => trial.value, ...figureAxis(trials)}];
  const x = (at) => 60 + (at * (width - 120)) / Math.max(1, axes.length - 1), y = (share) => height - bottom - share * (height - top - bottom);
  const ordered = [...trials].sort((a, b) => Boolean(isBest(a, found)) - Boolean(isBest(b, found)));
  return plot("Settings and figure of every finished trial", width, height, "parallel",
    ordered.map((trial) => el("polyline", {points: axes.map((one, at) => `${x(at).toFixed(1)},${y(one.place(one.of(trial))).toFixed(1)}`).join(" "), class: isBest(trial, found) ? "trial best" : "trial"}, el("title", {}, `trial ${trial.number}: ${number(trial.value, 5)}`))),
    axes.map((one, at) => el("g", {}, el("line", {x1: x(at), x2: x(at), y1: y(0), y2: y(1), class: "axis"}),
      el("text", {x: x(at), y: 14, "text-anchor": "middle", class: "name"}, one.name), el("text", {x: x(at) + 6, y: y(1) + 4}, one.ends[1]), el("text", {x: x(at) + 6, y: y(0) + 4}, one.ends[0]))));
}

export function slices(keys, trials, found) {
  const width = 320, height = 200, up = figureAxis(trials);
  const y = (value) => height - 30 - up.place(value) * (height - 60);
  return el("div", {class: "columns slices"}, keys.map((key) => {
    const across = axis(key, found.parameters[key], trials), x = (value) => 50 + across.place(value) * (width - 80);
    return plot(`${found.metric} by ${key}`, width, height, "slice",
      el("line", {x1: 40, x2: width - 20, y1: height - 22, y2: height - 22, class: "axis"}), el("line", {x1: 40, x2: 40, y1: 20, y2: height - 22, class: "axis"}),
      trials.map((trial) => el("circle", {cx: x(trial.parameters[key]), cy: y(trial.value), r: isBest(trial, found) ? 5 : 3.5, class: isBest(trial, found) ? "dot best" : "dot"}, el("title", {}, `trial ${trial.number}: ${valueOf(trial.parameters[key])}, ${number(trial.value, 5)}`))),
      el("text", {x: 34, y: 26, "text-anchor": "end"}, up.ends[1]), el("text", {x: 34, y: height - 26, "text-anchor": "end"}, up.ends[0]),
      (across.ticks.length && across.ticks.length <= 6 ? across.ticks : []).map((tick) => el("text", {x: x(parsed(tick, key, trials)), y: height - 6, "text-anchor": "middle"}, tick)),
      !across.ticks.length && [el("text", {x: 50, y: height - 6}, across.ends[0]), el("text", {x: width - 30, y: height - 6, "text-anchor": "end"}, across.ends[1])]);
  }));
}

// The value that the text of a tick represents, if a trial has it.
function parsed(tick, key, trials) {
  const found = trials.find((trial) => valueOf(trial.parameters[key]) === tick);
  if (found) return found.parameters[key];
  try { return JSON.parse(tick); } catch { return tick; }
}

function plot(title, width, height, kind, ...marks) {
  return el("figure", {class: "chart"}, el("figcaption", {}, title), el("div", {class: "scroll", tabindex: kind === "parallel" ? "0" : null, role: kind === "parallel" ? "region" : null, "aria-label": kind === "parallel" ? title : null}, el("svg", {viewBox: `0 0 ${width} ${height}`, class: `plotted ${kind}`, role: "img", "aria-label": `${title}; the table of trials has the numbers`}, marks)));
}
