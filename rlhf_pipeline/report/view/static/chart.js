// One curve with several runs: hover shows values, a click calls back, a drag zooms, a flat curve is one line of text.
import { html } from "lit-html";
import { colors, fmt } from "view/api.js";

export function summary(lines) {
  const all = lines.flatMap(line => line.ys.filter(y => y !== null));
  if (!all.length) return "no values";
  const low = all.reduce((a, b) => Math.min(a, b)), high = all.reduce((a, b) => Math.max(a, b));
  if (low === high) return `constant: ${fmt(low)}`;
  return `from ${fmt(low)} to ${fmt(high)}, last ${lines.map(l => fmt(l.ys.findLast(y => y !== null) ?? null)).join(", ")}`;
}

export const isFlat = lines => new Set(lines.flatMap(line => line.ys.filter(y => y !== null))).size < 2;

export function smoothed(ys, by) {
  let mean = null, weight = 0;
  return by ? ys.map(y => y === null ? null : (mean = by * (mean ?? 0) + (1 - by) * y, weight = by * weight + 1 - by, mean / weight)) : ys;
}

export const asTable = (xName, lines) => html`<details class="values"><summary>as a table</summary>
  <div class="scroll" tabindex="0" role="region" aria-label="values"><table><thead><tr><th>${xName}</th>${lines.map(l => html`<th>${l.name}</th>`)}</tr></thead>
  <tbody>${(lines[0]?.xs ?? []).map((x, i) => i % Math.ceil(lines[0].xs.length / 40) ? "" :
    html`<tr><td>${fmt(x)}</td>${lines.map(l => html`<td>${fmt(l.ys[l.xs.indexOf(x)] ?? null)}</td>`)}</tr>`)}</tbody></table></div></details>`;

export function plot(box, lines, { height = 180, time = false, target = null, onPick = null, onHover = null, sync = "step", min = null, max = null } = {}) {
  const xs = [...new Set(lines.flatMap(line => line.xs))].sort((a, b) => a - b), place = new Map(xs.map((x, i) => [x, i]));
  const data = lines.map(line => {
    const ys = new Array(xs.length).fill(null);
    line.xs.forEach((x, i) => { ys[place.get(x)] = line.ys[i]; });
    return ys;
  });
  const dark = matchMedia("(prefers-color-scheme: dark)").matches, ink = dark ? "#9aa4b2" : "#586172", rule = dark ? "#2a313c" : "#e6e9ef";
  const axis = { stroke: ink, grid: { stroke: rule, width: 1 }, ticks: { stroke: rule, width: 1 } };
  const near = (ys, i) => { let j = i; while (j > 0 && ys[j] === null && i - j < 5) j--; return ys[j] ?? null; };
  const hooks = { setCursor: [u => onHover?.(u.cursor.idx == null ? null : xs[u.cursor.idx], data.map(ys => u.cursor.idx == null ? null : near(ys, u.cursor.idx)))] };
  if (onPick) hooks.ready = [u => u.over.addEventListener("click", () => {
    const i = u.cursor.idx, line = data.findIndex(ys => i !== null && near(ys, i) !== null);
    if (i !== null && line >= 0 && u.select.width < 3) onPick(xs[i], line);
  })];
  const goal = target === null ? [] : [{ stroke: ink, width: 1, dash: [4, 4], points: { show: false } }];
  const range = min === null ? undefined : (_u, low, high) => [Math.min(min, low), Math.max(max, high)];
  return new uPlot({
    width: Math.max(box.clientWidth, 120), height, hooks, legend: { show: false }, cursor: { sync: { key: sync }, drag: { x: true, y: false } },
    scales: { x: { time }, y: { range } }, axes: [{ ...axis, incrs: time ? undefined : [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6] }, { ...axis, size: 58 }],
    series: [{}, ...lines.map((line, i) => ({ stroke: line.color ?? colors[i % 6], width: 1.8, spanGaps: true })), ...goal],
  }, [xs, ...data, ...(target === null ? [] : [xs.map(() => target)])], box);
}
