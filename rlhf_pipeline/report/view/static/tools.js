// Tool calls and their results, of messages and of texts that have them between tags.
import { html, nothing } from "lit-html";
import { visible } from "view/api.js";

const TAGS = /<(tool_call|tool_response)>([^]*?)<\/\1>/g;
const pretty = value => { try { return JSON.stringify(typeof value === "string" ? JSON.parse(value) : value, null, 1); } catch { return String(value); } };
const box = (kind, name, body) => html`<div class="tool ${kind}"><b class="turn">${kind === "call" ? "calls" : "result of"} ${visible(name)}</b><div class="text2" dir="auto">${visible(body)}</div></div>`;

function parsed(text) {
  try { const call = JSON.parse(text); return [String(call.name ?? "a tool"), pretty(call.arguments ?? call)]; } catch { return ["a tool", text.trim()]; }
}

// A text with its tagged calls and results as boxes; the rest is drawn by `body`.
export function withTools(text, body) {
  const parts = []; let end = 0;
  for (const match of text.matchAll(TAGS)) {
    if (match.index > end) parts.push(body(text.slice(end, match.index)));
    parts.push(match[1] === "tool_call" ? box("call", ...parsed(match[2])) : box("result", "a tool", match[2].trim()));
    end = match.index + match[0].length;
  }
  if (end < text.length || !parts.length) parts.push(body(text.slice(end)));
  return parts;
}

const textOf = content => typeof content === "string" ? content : Array.isArray(content) && content.every(part => typeof part?.text === "string") ? content.map(part => part.text).join("") : content == null ? "" : pretty(content);

const isTagged = text => /<tool_(call|response)>/.test(text);
export const hasTools = messages => messages.some(m => m?.role === "tool" || m?.tool_calls?.length || isTagged(textOf(m?.content)));

// A message: its text, then its calls; a tool's message is the result of the call with its id.
export function message(m, all, body) {
  const calls = Array.isArray(m?.tool_calls) ? m.tool_calls : [], text = textOf(m?.content);
  if (m?.role === "tool") {
    const call = all.flatMap(one => Array.isArray(one?.tool_calls) ? one.tool_calls : []).find(one => one?.id !== undefined && one.id === m.tool_call_id);
    return html`<div class="message">${box("result", String(m.name ?? call?.function?.name ?? call?.name ?? "a tool"), text)}</div>`;
  }
  const known = m && typeof m === "object" && ("content" in m || calls.length);
  return html`<div class="message"><b class="turn">${visible(String(m?.role ?? "?"))}</b>${known ? (text ? withTools(text, body) : nothing) : body(pretty(m))}
    ${calls.map(call => box("call", String(call?.function?.name ?? call?.name ?? "a tool"), pretty(call?.function?.arguments ?? call?.arguments ?? call)))}</div>`;
}
