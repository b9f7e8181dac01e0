// Answers of the server; in a report, answers that were recorded in the page.
const recorded = document.getElementById("recorded");
const answers = recorded && JSON.parse(recorded.textContent);
export const isReport = answers !== null;

export async function get(path) {
  if (isReport) return fromReport(path);
  const reply = await fetch(`/api/${path}`, { headers: { accept: "application/json" } });
  const found = await reply.json().catch(() => ({ error: "The server did not answer." }));
  if (!reply.ok) throw new Error(found.error);
  return found;
}

function fromReport(path) {
  const [place, query] = path.split("?");
  if (place.endsWith("/trajectories")) return searched(answers[place], new URLSearchParams(query));
  if (answers[place]) return answers[place];
  const [, , what, id] = place.split("/");
  throw new Error(`This report has a choice of the run; ${what?.replace(/s$/, "")} ${id ?? ""} is not among it. ` +
    "rlhf-pipeline view RUN shows all.");
}

// In a report: the same question as the server's, over the recorded rows.
const FIELDS = { task_reward: "reward", policy_version: "version", group_id: "group", finish_reason: "finish",
  num_completion_tokens: "tokens", reward_trusted: "trusted" };
const COMPARE = { ">=": (a, b) => a >= b, "<=": (a, b) => a <= b, ">": (a, b) => a > b, "<": (a, b) => a < b };

function condition(text) {
  const [, name, sign, value] = text.match(/^\s*(\w+)\s*(>=|<=|==|!=|>|<|=)\s*(.+?)\s*$/) ?? [];
  if (!sign) throw new Error(`The filter ${text} cannot be read. Write for example reward>=0.5`);
  const field = FIELDS[name] ?? name, wanted = { nan: null, true: true, false: false }[value] ?? value;
  const same = row => value === "nan" ? row[field] === null : String(row[field]) === String(wanted) || row[field] === Number(value);
  if (COMPARE[sign]) return row => row[field] !== null && COMPARE[sign](row[field], Number(value));
  return sign === "!=" ? row => !same(row) : same;
}

function searched(all, query) {
  const tests = query.getAll("where").map(condition), text = (query.get("text") ?? "").toLowerCase();
  const sort = query.get("sort") ?? "-id", key = sort.replace("-", ""), sign = sort[0] === "-" ? -1 : 1;
  const offset = Number(query.get("offset") ?? 0), column = query.get("in") ?? "completion";
  const rows = all.rows.filter(row => tests.every(test => test(row)) && row[column].toLowerCase().includes(text));
  const value = row => row[key] === null ? Infinity : sign * Number(row[key]);
  rows.sort((a, b) => value(a) - value(b));
  return { ...all, total: all.rows.length, matched: rows.length, complete: true, offset, rows: rows.slice(offset, offset + 50) };
}

export function fmt(x, digits = 3) {
  if (x === null || x === undefined) return "–";
  if (typeof x !== "number") return String(x);
  if (Number.isInteger(x)) return x.toLocaleString("en");
  const size = Math.abs(x);
  return size >= 1e5 || size < 5e-4 ? x.toExponential(2) : size >= 1000 ? x.toFixed(0) : x.toFixed(digits);
}

export function ago(seconds) {
  const age = Math.max(0, Date.now() / 1000 - seconds);
  return age < 90 ? `${Math.round(age)} s ago` : age < 5400 ? `${Math.round(age / 60)} min ago`
    : age < 172800 ? `${Math.round(age / 3600)} h ago` : `${Math.round(age / 86400)} days ago`;
}

// A row's number: the second day's ids have ten digits, so segment and row are told apart.
export const short = id => { const n = BigInt(id); return n >> 32n ? `${n >> 32n}:${n & 0xffffffffn}` : id; };

// Text that is shown as it is, with what cannot be seen named.
const NAMES = { " ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍", "\0": "␀", "\x1b": "␛" };
export const visible = text => text.replace(/[\u0000-\u001f\u007f\u202a-\u202e\u2066-\u2069]/g,
  c => c === "\n" || c === "\t" ? c : NAMES[c] ?? `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);
export const named = piece => /^\s*$/.test(piece) ? [...piece].map(c => NAMES[c] ?? c).join("") || "∅" : visible(piece);

export const colors = ["#1f77d0", "#c2570c", "#178a64", "#a54fc4", "#957a00", "#d0217f"];
