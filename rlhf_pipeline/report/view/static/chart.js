// One curve with several runs: hover shows values, a click calls back, a drag zooms, a flat curve is one line of text.
import { html } from "lit-html";
import { colors, fmt } from "view/api.js";

const ends = line => [...line.ys, ...(line.band ? [...line.band[0], ...line.band[1]] : [])].filter(y => y !== null && y !== undefined);
const lastOf = line => line.ys.findLast(y => y !== null) ?? null;

export function summary(lines) {
  const all = lines.flatMap(line => line.ys.filter(y => y !== null));
  if (!all.length) return "no values";
  const low = all.reduce((a, b) => Math.min(a, b)), high = all.reduce((a, b) => Math.max(a, b));
  if (low === high) return `constant: ${fmt(low)}`;
  return `from ${fmt(low)} to ${fmt(high)}, last ${lines.map(line => fmt(lastOf(line))).join(", ")}`;
}

export const isFlat = lines => new Set(lines.flatMap(ends)).size < 2;

export function smoothed(ys, by) {
  let mean = null, weight = 0;
  return by ? ys.map(y => y === null ? null : (mean = by * (mean ?? 0) + (1 - by) * y, weight = by * weight + 1 - by, mean / weight)) : ys;
}

export const asTable = (xName, lines) => html`<details class="values"><summary>as a table</summary>
  <div class="scroll" tabindex="0" role="region" aria-label="values"><table><thead><tr><th>${xName}</th>${lines.map(l => html`<th>${l.name}</th>`)}</tr></thead>
  <tbody>${(lines[0]?.xs ?? []).map((x, i) => i % Math.ceil(lines[0].xs.length / 40) ? "" :
    html`<tr><td>${fmt(x)}</td>${lines.map(l => { const at = l.xs.indexOf(x); return html`<td>${fmt(l.ys[at] ?? null)}${l.band?.[0][at] == null ? "" : html` <span class="soft">${fmt(l.band[0][at])} … ${fmt(l.band[1][at])}</span>`}</td>`; })}</tr>`)}</tbody></table></div></details>`;

// Ticks with as many digits as tell them apart, and one exponent for all of them.
export function ticks(values) {
  const known = values.filter(value => value !== null), most = Math.max(...known.map(Math.abs), 0);
  const step = Math.min(...known.slice(1).map((value, i) => Math.abs(value - known[i])).filter(Boolean), Infinity);
  if (!most || !Number.isFinite(step)) return values.map(value => value === null ? "" : fmt(value));
  const exponent = most >= 1e5 || most < 1e-2 ? 3 * Math.floor(Math.log10(most) / 3 + 1e-9) : 0, unit = 10 ** exponent;
  let digits = Math.max(0, Math.min(12, Math.ceil(-Math.log10(step / unit) - 1e-9)));
  for (const most = digits + 3; digits < most && Math.abs(step / unit * 10 ** digits - Math.round(step / unit * 10 ** digits)) > 1e-6;) digits++;
  return values.map(value => value === null ? "" : value === 0 ? "0" : `${(value / unit).toFixed(digits)}${exponent ? `e${exponent}` : ""}`);
}

export function plot(box, lines, { height = 180, time = false, target = null, onPick = null, onHover = null, sync = "step", min = null, max = null, points = false } = {}) {
  const xs = [...new Set(lines.flatMap(line => line.xs))].sort((a, b) => a - b), place = new Map(xs.map((x, i) => [x, i]));
  const spread = (line, values) => {
    const ys = new Array(xs.length).fill(null);
    line.xs.forEach((x, i) => { ys[place.get(x)] = values[i] ?? null; });
    return ys;
  };
  const data = lines.map(line => spread(line, line.ys)), edges = [], bands = [], sides = [];
  const color = i => lines[i].color ?? colors[i % 6];
  lines.forEach((line, i) => line.band && (bands.push({ series: [lines.length + edges.length + 2, lines.length + edges.length + 1], fill: `${color(i)}2e` }),
    edges.push(spread(line, line.band[0]), spread(line, line.band[1])), sides.push(i, i)));
  const dark = matchMedia("(prefers-color-scheme: dark)").matches, ink = dark ? "#9aa4b2" : "#586172", rule = dark ? "#2a313c" : "#e6e9ef";
  const axis = { stroke: ink, grid: { stroke: rule, width: 1 }, ticks: { stroke: rule, width: 1 } };
  const near = (ys, i) => { let j = i; while (j > 0 && ys[j] === null && i - j < 5) j--; return ys[j] ?? null; };
  const hooks = { setCursor: [u => onHover?.(u.cursor.idx == null ? null : xs[u.cursor.idx], data.map(ys => u.cursor.idx == null ? null : near(ys, u.cursor.idx)))] };
  // Of several curves, a click means the one under the pointer.
  const under = (u, i) => data.map((ys, n) => [near(ys, i), n]).filter(([y]) => y !== null)
    .map(([y, n]) => [Math.abs(u.valToPos(y, "y") - u.cursor.top), n]).sort((a, b) => a[0] - b[0])[0]?.[1];
  if (onPick) hooks.ready = [u => u.over.addEventListener("click", () => {
    const i = u.cursor.idx, line = i == null ? undefined : under(u, i);
    if (line !== undefined && u.select.width < 3) onPick(xs[i], line);
  })];
  const goal = target === null ? [] : [{ stroke: ink, width: 1, dash: [4, 4], points: { show: false } }];
  const range = min === null ? undefined : (_u, low, high) => [Math.min(min, low), Math.max(max, high)];
  const labels = (_u, values) => ticks(values), few = xs.length < 40;
  return new uPlot({
    width: Math.max(box.clientWidth, 120), height, hooks, bands, legend: { show: false }, cursor: { sync: { key: sync }, drag: { x: true, y: false } },
    scales: { x: { time }, y: { range } },
    axes: [{ ...axis, ...(time ? {} : { incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6], values: (_u, values) => values.map(value => fmt(value)) }) }, { ...axis, size: 64, values: labels }],
    series: [{}, ...lines.map((_, i) => ({ stroke: color(i), width: 1.8, spanGaps: true, points: { show: points || few } })),
      ...sides.map(i => ({ stroke: `${color(i)}00`, width: 0, spanGaps: true, points: { show: false } })), ...goal],
  }, [xs, ...data, ...edges, ...(target === null ? [] : [xs.map(() => target)])], box);
}
