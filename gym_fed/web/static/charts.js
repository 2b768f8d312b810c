// Charts with uPlot, which the server sends before this module. Dashes, weights and markers distinguish series, not hues.
import {count, el, leave, number, replace} from "./app.js";

const WHOLE = [...Array(12).keys()].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));
const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3], [14, 5], [4, 2, 1, 2]];
const WIDTHS = [1.75, 1.75, 1.75, 1.5, 1.25, 1.25];
const MARKERS = ["", "hollow", "", "filled", "hollow", "filled"];
const EVERY_POINT = 14, SOME_POINTS = 56; // pixels between markers, if every point has one and if only some do

// chart({title, xLabel, yLabel, height, log}) -> {node, set(series), zoom(min, max)}; a series is {name, points: [[x, y], ...], raw, errors},
// where raw, if given, is drawn faintly behind, and errors are the standard errors of the points, drawn as vertical bars; `lines` are [{x, text}], drawn as vertical lines; `none` says when the first point comes. `onZoom(min, max)` is called when a range
// is chosen by dragging, and with null to show all. Charts of one `group` move their cursors together.
export function chart({title, xLabel = "step", yLabel = "", height = 260, log = false, onZoom = null, range = null, group = "", xText = number, none = "No values yet.", whole = ["version", "step", "round"].includes(xLabel)}) {
  const spoken = el("p", {class: "visually-hidden", role: "status"});
  const holder = el("div", {class: "plot", tabindex: 0, role: "group", "aria-label": `${title}: left and right show values${onZoom ? ", + zooms in, - shows all" : ""}`, onkeydown: keys});
  const legend = el("div", {class: "legend"});
  const said = el("p", {class: "visually-hidden"});
  const node = el("figure", {class: "chart", role: "group", "aria-label": title}, el("figcaption", {}, title), holder, legend, said, spoken);
  let plot = null, shape = "", series = [], marks = [], limits = range;

  function options(width) {
    const style = getComputedStyle(document.documentElement);
    const ink = style.getPropertyValue("--ink").trim(), line = style.getPropertyValue("--line").trim(), quiet = style.getPropertyValue("--quiet").trim();
    const font = `11px ${style.getPropertyValue("--sans")}`;
    const axis = {stroke: quiet, font, grid: {stroke: line, width: 1}, ticks: {stroke: line, width: 1, size: 4}};
    return {
      width, height, legend: {show: false}, cursor: {points: {size: 6}, drag: {x: true, y: false, setScale: !onZoom}, ...(group && {sync: {key: group}}), ...(onZoom && {bind: {dblclick: () => () => onZoom(null, null)}})},
      scales: {x: {time: false, range: limits ? () => limits : undefined}, y: log ? {distr: 3} : series.some((one) => one.errors) ? {range: withErrors} : {}},
      axes: [{...axis, ...(whole ? {incrs: WHOLE} : {values: (_, ticks) => ticks.map((tick) => xText(tick))}), label: xLabel, labelFont: font, labelSize: 18, size: 34}, {...axis, label: yLabel || null, labelFont: font, labelSize: yLabel ? 16 : 0, size: (_, texts) => Math.max(58, 14 + 7 * Math.max(0, ...(texts || []).map((text) => text.length))), values: (_, ticks) => tickTexts(ticks, log)}],
      series: [{}, ...raws().map((one) => ({label: `${one.name}, not smoothed`, stroke: ink, alpha: 0.28, width: 1, spanGaps: true, points: {show: false}})), ...series.map((one, at) => ({
        label: one.name, stroke: ink, width: WIDTHS[at % 6], dash: DASHES[at % 6], spanGaps: true,
        points: {show: one.points.length < 3, filter: one.points.length > 2 && MARKERS[at % 6] ? marked : undefined, size: 6, width: 1.25, stroke: ink, fill: MARKERS[at % 6] === "filled" ? ink : style.getPropertyValue("--paper").trim()},
      }))],
      hooks: {
        draw: [(drawn) => { drawMarks(drawn, ink); drawErrors(drawn, ink); }],
        setCursor: [(drawn) => showValues(drawn.cursor.idx)],
        setSelect: [(drawn) => {
          if (!onZoom || drawn.select.width < 4) return;
          const [low, high] = [drawn.posToVal(drawn.select.left, "x"), drawn.posToVal(drawn.select.left + drawn.select.width, "x")];
          drawn.setSelect({left: 0, width: 0, top: 0, height: 0}, false);
          onZoom(low, high);
        }],
      },
    };
  }

  // Choose the points with markers; a long line keeps some, so that it looks like its key in the legend.
  function marked(drawn, at) {
    const [xs, ys] = [drawn.data[0], drawn.data[at]], {min, max} = drawn.scales.x, found = [];
    for (const [place, x] of xs.entries()) if (ys[place] !== null && x >= min && x <= max) found.push(place);
    const lefts = found.map((place) => drawn.valToPos(xs[place], "x"));
    return spaced(lefts, drawn.bbox.width / devicePixelRatio, at * 9).map((one) => found[one]); // so that overlapping lines have markers at different places
  }

  function drawMarks(drawn, ink) {
    const {ctx} = drawn;
    ctx.save();
    ctx.strokeStyle = ink;
    ctx.fillStyle = ink;
    ctx.setLineDash([1, 3]);
    ctx.font = `${10 * devicePixelRatio}px sans-serif`;
    for (const {x, text} of marks) {
      const left = drawn.valToPos(x, "x", true);
      if (!(left >= drawn.bbox.left && left <= drawn.bbox.left + drawn.bbox.width)) continue;
      ctx.beginPath();
      ctx.moveTo(left, drawn.bbox.top);
      ctx.lineTo(left, drawn.bbox.top + drawn.bbox.height);
      ctx.stroke();
      const isAtEnd = left + ctx.measureText(text).width + 8 > drawn.bbox.left + drawn.bbox.width;
      ctx.textAlign = isAtEnd ? "right" : "left";
      ctx.fillText(text, left + (isAtEnd ? -4 : 4), drawn.bbox.top + 10 * devicePixelRatio);
    }
    ctx.restore();
  }

  function drawErrors(drawn, ink) {
    const {ctx, bbox} = drawn, cap = 3 * devicePixelRatio;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.strokeStyle = ink;
    ctx.lineWidth = devicePixelRatio;
    for (const {points, errors} of series) {
      for (const [at, [x, y]] of (errors ? points : []).entries()) {
        if (errors[at] === null) continue;
        const left = drawn.valToPos(x, "x", true), ends = [y - errors[at], y + errors[at]].map((value) => drawn.valToPos(value, "y", true));
        ctx.beginPath();
        ctx.moveTo(left, ends[0]);
        ctx.lineTo(left, ends[1]);
        for (const end of ends) { ctx.moveTo(left - cap, end); ctx.lineTo(left + cap, end); }
        ctx.stroke();
      }
    }
    ctx.restore();
  }

  // The range from the lowest to the highest value with errors; a chart without errors uses uPlot's scale.
  function withErrors(drawn, low, high) {
    for (const {points, errors} of series) for (const [at, [, y]] of (errors ? points : []).entries()) { low = Math.min(low, y - (errors[at] ?? 0)); high = Math.max(high, y + (errors[at] ?? 0)); }
    return uPlot.rangeNum(low, high, 0.1, true);
  }

  // The values at the cursor; a line without a point there shows its nearest point.
  function showValues(at) {
    if (!plot) return;
    const isAt = at !== null && at !== undefined && plot.data[0][at] !== undefined;
    legend.querySelector(".at").textContent = isAt ? `${xLabel} ${xText(plot.data[0][at])}` : "";
    series.forEach((one, place) => {
      const [x, value] = isAt ? nearest(one.points, plot.data[0][at]) : one.points.at(-1);
      const error = one.errors?.[one.points.findIndex(([other]) => other === x)];
      const raw = one.raw && isAt ? nearest(one.raw, plot.data[0][at])[1] : null;
      const node = legend.children[place + 1].querySelector(".value");
      node.textContent = [number(value, 4), error !== null && error !== undefined && `± ${number(error, 3)}`, raw !== null && `(raw ${number(raw, 4)})`, isAt && x !== plot.data[0][at] && `at ${xText(x)}`].filter(Boolean).join(" ");
    });
  }

  // Move the cursor and zoom with the keyboard.
  function keys(event) {
    if (!plot || event.ctrlKey || event.altKey || event.metaKey) return;
    const xs = plot.data[0], {min, max} = plot.scales.x, shown = xs.map((x, at) => at).filter((at) => xs[at] >= min && xs[at] <= max);
    const move = {ArrowLeft: -1, ArrowRight: 1, Home: -xs.length, End: xs.length}[event.key], now = plot.cursor.idx ?? shown.at(-1);
    if (move && shown.length) {
      const at = Math.min(shown.at(-1), Math.max(shown[0], now + move));
      plot.setCursor({left: plot.valToPos(xs[at], "x"), top: 0});
      showValues(at);
      spoken.textContent = legend.innerText.replaceAll(/\s+/g, " ");
    } else if (onZoom && (event.key === "+" || event.key === "=")) {
      const middle = xs[now] ?? (min + max) / 2, quarter = (max - min) / 4;
      onZoom(Math.max(min, middle - quarter), Math.min(max, middle + quarter));
    } else if (onZoom && event.key === "-") onZoom(null, null);
    else return;
    event.preventDefault();
  }

  const raws = () => series.filter((one) => one.raw).map((one) => ({name: one.name, points: one.raw}));

  function joined() {
    const xs = [...new Set(series.flatMap((one) => one.points.map(([x]) => x)))].sort((a, b) => a - b);
    const place = new Map(xs.map((x, at) => [x, at]));
    return [xs, ...[...raws(), ...series].map((one) => {
      const column = new Array(xs.length).fill(null);
      for (const [x, y] of one.points) column[place.get(x)] = log && !(y > 0) ? null : y;
      return column;
    })];
  }

  function draw(again = false) {
    const width = Math.max(200, holder.clientWidth);
    const now = `${series.map((one) => one.name).join("\u0000")}|${limits}|${series.map((one) => one.points.length < 3)}|${raws().length}`;
    if (plot && !again && now === shape) { plot.setData(joined()); showValues(null); return; }
    shape = now;
    if (plot) plot.destroy();
    plot = new uPlot(options(width), joined(), holder);
    node.classList.toggle("single", series.length === 1);
    replace(legend, el("span", {class: "at quiet"}), series.map((one, at) => el("span", {class: "key"}, series.length > 1 && swatch(at), (series.length > 1 || one.name !== title) && el("span", {}, one.name), el("span", {class: "value"}))));
    showValues(null);
  }

  const watch = new ResizeObserver(() => plot && plot.setSize({width: Math.max(200, holder.clientWidth), height}));
  watch.observe(holder);
  const theme = matchMedia("(prefers-color-scheme: dark)");
  const redraw = () => plot && draw(true);
  theme.addEventListener("change", redraw);
  leave(() => { watch.disconnect(); theme.removeEventListener("change", redraw); if (plot) plot.destroy(); plot = null; });

  return {
    node,
    set(given, {lines = [], none: why = none} = {}) {
      series = given.filter((one) => one.points.length);
      marks = lines;
      node.hidden = false;
      if (!series.length) { if (plot) plot.destroy(); plot = null; shape = ""; replace(holder, el("p", {class: "none"}, why)); replace(legend); return; }
      if (!plot) replace(holder);
      if (!holder.isConnected) { requestAnimationFrame(() => holder.isConnected && draw()); return; }
      draw();
      said.textContent = series.map((one) => `${one.name}: ${count(one.points.length, "value")}, last ${number(last(one.points), 4)} at ${xLabel} ${one.points.at(-1)[0]}`).join("; ");
    },
    zoom(low, high) { limits = low === null ? null : [low, high]; if (plot) draw(true); },
  };
}

// Return the positions that get a marker, from the left: all if there is room, otherwise some.
export function spaced(lefts, width, first = 0) {
  if (lefts.length * EVERY_POINT <= width) return [...lefts.keys()];
  let next = first;
  return [...lefts.keys()].filter((at) => { if (lefts[at] < next) return false; next = lefts[at] + SOME_POINTS; return true; });
}

// Return the first point at or after x, or the last one; points are ordered by x.
function firstFrom(points, x) {
  let low = 0, high = points.length - 1;
  while (low < high) { const middle = (low + high) >> 1; if (points[middle][0] < x) low = middle + 1; else high = middle; }
  return low;
}

export function nearest(points, x) {
  const low = firstFrom(points, x);
  return low > 0 && x - points[low - 1][0] < points[low][0] - x ? points[low - 1] : points[low];
}

// Interpolate y of a curve at x.
export function between(points, x) {
  if (!points.length) return null;
  const after = firstFrom(points, x);
  if (points[after][0] < x) return points[after][1];
  if (!after) return points[0][1] * (points[0][0] ? x / points[0][0] : 1);
  const [[x0, y0], [x1, y1]] = [points[after - 1], points[after]];
  return x1 === x0 ? y1 : y0 + ((y1 - y0) * (x - x0)) / (x1 - x0);
}

const last = (points) => (points.length ? points.at(-1)[1] : null);
// Format the labels of an axis in one notation, with enough digits to distinguish them; on a logarithmic axis, one by one.
export function tickTexts(ticks, isLog) {
  const known = ticks.filter((tick) => tick !== null && tick !== undefined), most = Math.max(...known.map(Math.abs), 0);
  if (isLog || known.length < 2 || !most) return ticks.map((tick) => (tick === null || tick === undefined ? "" : compact(tick)));
  const step = Math.min(...known.slice(1).map((tick, at) => Math.abs(tick - known[at]))), power = most >= 1e6 || most < 1e-3 ? Math.floor(Math.log10(most) + 1e-9) : 0;
  const scale = 10 ** power, needs = (digits) => Math.abs(Number((step / scale).toFixed(digits)) - step / scale) > 1e-3 * (step / scale);
  let digits = 0;
  while (digits < 10 && needs(digits)) digits++;
  return ticks.map((tick) => (tick === null || tick === undefined ? "" : tick === 0 || !power ? tick.toFixed(tick === 0 ? 0 : digits) : `${(tick / scale).toFixed(digits)}e${power}`));
}

function compact(value) {
  if (Math.abs(value) >= 1e5 || (value !== 0 && Math.abs(value) < 1e-4)) return value.toExponential(0);
  return String(Number(value.toPrecision(4)));
}

function swatch(at) {
  return el("svg", {width: 26, height: 8, "aria-hidden": "true", class: "swatch"},
    el("line", {x1: 0, y1: 4, x2: 26, y2: 4, stroke: "currentColor", "stroke-width": WIDTHS[at % 6], "stroke-dasharray": DASHES[at % 6].join(" ")}),
    MARKERS[at % 6] && el("circle", {cx: 13, cy: 4, r: 2.5, stroke: "currentColor", "stroke-width": 1.25, fill: MARKERS[at % 6] === "filled" ? "currentColor" : "var(--paper)"}));
}

// Exponential moving average as in TensorBoard, with correction for the start; 0 is no smoothing.
export function smoothed(points, share) {
  if (!share) return points;
  let mean = 0, weight = 0;
  return points.map(([x, y]) => { mean = share * mean + (1 - share) * y; weight = share * weight + 1 - share; return [x, mean / weight]; });
}

// A sparkline with the height of the text, for a table.
export function spark(values, {width = 80, height = 18} = {}) {
  const known = values.filter((value) => Number.isFinite(value));
  if (known.length < 2) return el("span", {class: "quiet"}, "–");
  const low = Math.min(...known), high = Math.max(...known), span = high - low || 1;
  const points = known.map((value, at) => `${((at / (known.length - 1)) * (width - 2) + 1).toFixed(1)},${(height - 2 - ((value - low) / span) * (height - 4)).toFixed(1)}`).join(" ");
  return el("svg", {width, height, class: "spark", role: "img", "aria-label": `from ${number(known[0], 3)} to ${number(known.at(-1), 3)}`}, el("polyline", {points, fill: "none", stroke: "currentColor", "stroke-width": 1.25}));
}
