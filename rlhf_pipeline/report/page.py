"""The style and the script of the report page. The script builds text nodes only: stored text is never markup."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --back: #f6f7f9; --card: #ffffff; --text: #14181f; --soft: #5a6372;
  --line: #e1e5eb; --mark: #2f6fde; --good: #1c8a4b; --bad: 214, 69, 51; }
@media (prefers-color-scheme: dark) { :root { --back: #0d1015; --card: #14181f; --text: #e8ecf2; --soft: #98a1b0;
  --line: #2a313d; --mark: #77a7ff; --good: #58c98a; --bad: 240, 110, 90; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 28px 20px 64px; }
h1 { font-size: 26px; margin: 0 0 2px; } h2 { font-size: 18px; margin: 34px 0 10px; }
p { margin: 4px 0; } .soft { color: var(--soft); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px 16px; }
.two { display: grid; grid-template-columns: 1fr 1fr; gap: 14px; }
.small { display: grid; grid-template-columns: repeat(auto-fill, minmax(300px, 1fr)); gap: 14px; }
.wide { overflow-x: auto; }
svg.chart { width: 100%; height: auto; display: block; }
.narrow { display: none; }
.text { font: 13px/1.55 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; width: 100%; }
th, td { text-align: right; padding: 4px 10px; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 600; } th:first-child, td:first-child { text-align: left; }
table.fields td { text-align: left; white-space: normal; font-family: ui-monospace, monospace; }
.browser { display: grid; grid-template-columns: 300px 1fr; gap: 14px; }
#items { max-height: 560px; overflow-y: auto; padding: 6px; }
#items button { display: block; width: 100%; text-align: left; border: 0; background: none; color: inherit;
  font: 13px/1.4 ui-monospace, monospace; padding: 5px 8px; border-radius: 6px; cursor: pointer; overflow: hidden;
  text-overflow: ellipsis; white-space: nowrap; }
#items button:hover { background: var(--back); }
#items button[aria-current=true] { background: var(--mark); color: var(--card); }
#controls { margin-bottom: 10px; display: flex; gap: 14px; flex-wrap: wrap; }
select, input { font: inherit; color: inherit; background: var(--card); border: 1px solid var(--line);
  border-radius: 6px; padding: 3px 6px; }
.tokens { line-height: 2; } .tokens span { padding: 2px 0; border-radius: 3px; }
.tokens .prompt { color: var(--soft); }
.bar { display: inline-block; width: 120px; height: 10px; border-radius: 3px; vertical-align: middle;
  background: linear-gradient(to right, rgba(var(--bad), 0), rgba(var(--bad), 0.75)); border: 1px solid var(--line); }
@media (max-width: 760px) { .two, .browser { grid-template-columns: 1fr; } }
@media (max-width: 600px) { .broad { display: none; } .narrow { display: block; } main { padding: 16px 10px 48px; }
  .card { padding: 10px 8px; } }
"""

SCRIPT = """
const data = JSON.parse(document.getElementById("data").textContent);
const items = document.getElementById("items"), detail = document.getElementById("detail");
const version = document.getElementById("version"), order = document.getElementById("order");
const short = (x, n = 3) => x === null || x === undefined ? "-" : x.toFixed(n);
const add = (parent, tag, text, cls) => {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (cls) node.className = cls;
  parent.appendChild(node);
  return node;
};
function show(item, button) {
  for (const other of items.children) other.setAttribute("aria-current", other === button);
  detail.replaceChildren();
  add(detail, "p", `trajectory ${item.id}, group ${item.group_id ?? "-"}, policy version ` +
    `${item.policy_version ?? "-"}, finished by ${item.finish_reason || "-"}`, "soft");
  add(detail, "p", `reward ${short(item.reward)}, advantage ${short(item.advantage)}` +
    (item.answer === null ? "" : `, answer ${item.answer}`));
  if (item.error !== null) add(detail, "p", `reward call failed: ${item.error}`);
  const tokens = add(detail, "p", undefined, "text tokens");
  item.pieces.forEach((piece, place) => {
    const logProb = item.log_probs[place], mine = item.mask[place];
    const span = add(tokens, "span", piece, mine ? "" : "prompt");
    const prob = logProb === null || logProb === undefined ? null : Math.exp(logProb);
    if (mine && prob !== null) span.style.background = `rgba(var(--bad), ${(0.75 * (1 - prob)).toFixed(3)})`;
    const ref = item.ref_log_probs ? `, reference ${short(item.ref_log_probs[place])}` : "";
    span.title = `token ${item.token_ids[place]} at ${place}` +
      (prob === null ? ", not scored" : `: log-prob ${short(logProb)}, probability ${short(prob)}${ref}`);
  });
  if (item.cut) add(detail, "p", `${item.cut} more tokens; rlhf-pipeline show RUN --id ${item.id} --full`, "soft");
}
function list() {
  const chosen = data.filter(item => version.value === "" || String(item.policy_version) === version.value);
  const sign = { best: -1, worst: 1 }[order.value];
  if (sign) chosen.sort((a, b) => sign * ((a.reward ?? -1e9) - (b.reward ?? -1e9)));
  items.replaceChildren();
  for (const item of chosen) {
    const button = add(items, "button", `${short(item.reward, 2)}  ${item.completion.replaceAll("\\n", " ")}`);
    button.onclick = () => show(item, button);
  }
  if (items.firstChild) items.firstChild.click();
}
for (const value of [...new Set(data.map(item => item.policy_version))]) {
  const option = add(version, "option", `version ${value ?? "-"}`);
  option.value = String(value);
}
version.onchange = order.onchange = list;
list();
"""
