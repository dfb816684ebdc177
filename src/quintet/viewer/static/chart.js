// A line chart of one metric of several runs, as SVG.

import { h, svg } from "view/dom.js";
import { duration, number } from "view/format.js";

const MARGIN = { left: 52, right: 12, top: 10, bottom: 24 };

/** Return values smoothed by an exponential moving average without bias towards zero, weight between 0 and 1. */
export function smooth(values, weight) {
  let average = 0;
  return values.map((value, index) => {
    average = weight * average + (1 - weight) * value;
    return average / (1 - weight ** (index + 1));
  });
}

/** Return about `count` round numbers between `low` and `high`. */
export function ticks(low, high, count) {
  const rough = (high - low) / count;
  if (!(rough > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const size = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const first = Math.ceil(low / size);
  return Array.from({ length: Math.floor(high / size) - first + 1 }, (_, index) => (first + index) * size);
}

/**
 * Draw a chart into `container`.
 *
 * `curves`: {run, tone, steps, seconds, values}; `settings`: {axis: "steps" | "seconds", smoothing, log};
 * `bounds`: the healthy range, null for an open side; `findings`: what the diagnosis reports about this metric.
 */
export function drawChart(container, { curves, settings, bounds, findings, height = 190 }) {
  const width = Math.max(container.clientWidth, 220);
  const drawn = curves.filter((curve) => curve.values.length).map((curve) => prepare(curve, settings));
  if (!drawn.length) {
    container.replaceChildren(h("p", { class: "note" }, "No values yet."));
    return;
  }
  const scale = makeScale(drawn, settings, width, height);
  const parts = [
    ...healthyBand(bounds, scale), ...gridLines(scale), ...findingMarks(findings ?? [], drawn, scale, settings),
    ...drawn.flatMap((curve) => lines(curve, scale, settings.smoothing > 0)),
  ];
  const cursor = svg("line", { class: "cursor", y1: MARGIN.top, y2: height - MARGIN.bottom });
  const image = svg("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img" }, parts, cursor);
  const readout = h("div", { class: "readout", "aria-live": "off" });
  const show = (event) => moveCursor(event, image, cursor, readout, drawn, scale, settings);
  image.addEventListener("pointermove", show);
  image.addEventListener("pointerdown", show);
  image.addEventListener("pointerleave", () => {
    cursor.classList.remove("on");
    readout.replaceChildren();
  });
  container.replaceChildren(image, readout);
}

function prepare(curve, settings) {
  const values = settings.smoothing > 0 ? smooth(curve.values, settings.smoothing) : curve.values;
  return { ...curve, x: curve[settings.axis], y: values, raw: curve.values };
}

function makeScale(curves, settings, width, height) {
  const xs = curves.flatMap((curve) => [curve.x[0], curve.x.at(-1)]);
  const ys = curves.flatMap((curve) => [...curve.raw, ...curve.y]).filter((value) => !settings.log || value > 0);
  let [low, high] = ys.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
  const isLog = settings.log && ys.length > 0;
  if (!ys.length) [low, high] = [0, 1];
  const padding = isLog ? 0 : (high - low) * 0.06 || Math.abs(high) * 0.1 || 0.5;
  [low, high] = isLog ? [Math.log10(low), Math.log10(high) + 1e-9] : [low - padding, high + padding];
  const [left, right] = [Math.min(...xs), Math.max(...xs)];
  const span = right - left || 1;
  const inner = { width: width - MARGIN.left - MARGIN.right, height: height - MARGIN.top - MARGIN.bottom };
  return {
    width, height, low, high, left, right: left + span, isLog,
    x: (value) => MARGIN.left + ((value - left) / span) * inner.width,
    y: (value) => {
      const shown = isLog ? Math.log10(Math.max(value, 1e-300)) : value;
      return MARGIN.top + (1 - (shown - low) / (high - low || 1)) * inner.height;
    },
    invert: (pixel) => left + ((pixel - MARGIN.left) / inner.width) * span,
    axis: settings.axis,
  };
}

function gridLines(scale) {
  const bottom = scale.height - MARGIN.bottom;
  const vertical = ticks(scale.low, scale.high, 4).map((tick) => (scale.isLog ? 10 ** tick : tick));
  const rows = vertical.map((tick) => [
    svg("line", { class: "grid", x1: MARGIN.left, x2: scale.width - MARGIN.right, y1: scale.y(tick), y2: scale.y(tick) }),
    svg("text", { class: "tick", x: MARGIN.left - 6, y: scale.y(tick) + 4, "text-anchor": "end" }, number(Number(tick.toPrecision(6)))),
  ]);
  const columns = ticks(scale.left, scale.right, 5).map((tick) =>
    svg("text", { class: "tick", x: scale.x(tick), y: bottom + 16, "text-anchor": "middle" },
      scale.axis === "seconds" ? duration(tick) : number(tick)));
  return [...rows.flat(), ...columns];
}

function healthyBand(bounds, scale) {
  if (!bounds) return [];
  const [top, bottom] = [MARGIN.top, scale.height - MARGIN.bottom];
  const clamp = (pixel) => Math.min(Math.max(pixel, top), bottom);
  const high = bounds[1] === null ? top : clamp(scale.y(bounds[1]));
  const low = bounds[0] === null ? bottom : clamp(scale.y(bounds[0]));
  // a band that fills the chart says nothing
  if (low - high < 1 || low - high > bottom - top - 1) return [];
  return [svg("rect", { class: "healthy", x: MARGIN.left, y: high, width: scale.width - MARGIN.left - MARGIN.right, height: low - high })];
}

function findingMarks(findings, curves, scale, settings) {
  return findings.filter((finding) => finding.first_step !== null).map((finding) => {
    const position = (step) => {
      const curve = curves.find((each) => each.run === finding.run) ?? curves[0];
      if (settings.axis === "steps") return scale.x(step);
      const index = curve.steps.findIndex((each) => each >= step);
      return scale.x(curve.seconds[index < 0 ? curve.seconds.length - 1 : index]);
    };
    const [from, to] = [position(finding.first_step), position(finding.last_step ?? finding.first_step)];
    return svg("g", { class: `finding ${finding.severity}` },
      svg("title", {}, `${finding.run}: ${finding.title}`),
      svg("rect", { class: "span", x: from, y: MARGIN.top, width: Math.max(to - from, 2), height: scale.height - MARGIN.top - MARGIN.bottom }),
      svg("path", { class: "flag", d: `M${from} ${MARGIN.top}l5 -8h-10z` }));
  });
}

function lines(curve, scale, isSmoothed) {
  const path = (values) => values.map((value, index) =>
    `${index ? "L" : "M"}${scale.x(curve.x[index]).toFixed(1)} ${scale.y(value).toFixed(1)}`).join("");
  const parts = [svg("path", { class: `line ${curve.tone}`, d: path(curve.y) })];
  if (isSmoothed) parts.unshift(svg("path", { class: `line raw ${curve.tone}`, d: path(curve.raw) }));
  if (curve.y.length <= 40) {
    parts.push(...curve.y.map((value, index) =>
      svg("circle", { class: `dot ${curve.tone}`, cx: scale.x(curve.x[index]), cy: scale.y(value), r: 2.2 })));
  }
  return parts;
}

function moveCursor(event, image, cursor, readout, curves, scale, settings) {
  const box = image.getBoundingClientRect();
  const position = scale.invert(((event.clientX - box.left) / box.width) * scale.width);
  const nearest = curves.map((curve) => {
    const distances = curve.x.map((value) => Math.abs(value - position));
    return distances.indexOf(Math.min(...distances));
  });
  const at = curves[0].x[nearest[0]];
  cursor.classList.add("on");
  cursor.setAttribute("x1", scale.x(at));
  cursor.setAttribute("x2", scale.x(at));
  readout.replaceChildren(
    h("b", {}, settings.axis === "steps" ? `step ${number(at)}` : duration(at)),
    ...curves.map((curve, index) => h("span", { class: curve.tone }, `${curve.run} ${number(curve.raw[nearest[index]])}`)));
}

/** Return a small line without axes. */
export function sparkline(values, tone) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const points = values.map((value, index) =>
    `${((index / Math.max(values.length - 1, 1)) * 116 + 2).toFixed(1)},${(24 - ((value - low) / (high - low || 1)) * 20).toFixed(1)}`);
  return svg("svg", { class: "sparkline", viewBox: "0 0 120 28", "aria-hidden": "true" },
    svg("polyline", { class: `line ${tone}`, points: points.join(" ") }));
}
