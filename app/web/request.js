// One request: where its time went, as a bar of its phases and in words.

import { milliseconds, shortId } from "./grid.js";

const NAMES = { queue: "waiting", prefill: "prefill", decode: "decode", preempted: "preempted" };

export function showRequest(target, store, id, { onStep }) {
  const request = store.requests.get(id);
  target.replaceChildren();
  if (!request) return;
  const parts = phases(request);
  const start = parts[0]?.start ?? 0;
  const end = parts[parts.length - 1]?.end ?? start;

  target.append(element("p", "who", `${shortId(request.id)} of tenant ${request.tenant}: ${state(request)}`));
  const bar = element("div", "life");
  bar.setAttribute("role", "img");
  bar.setAttribute("aria-label", parts.map((p) => `${NAMES[p.kind]} ${milliseconds(p.end - p.start)}`).join(", then "));
  for (const part of parts) {
    const piece = element("span", part.kind);
    piece.style.flexGrow = Math.max(0.004, (part.end - part.start) / (end - start || 1));
    piece.title = `${NAMES[part.kind]}: ${milliseconds(part.end - part.start)}`;
    bar.append(piece);
  }
  const scale = element("p", "scale");
  scale.append(element("span", "", "0"), element("span", "", milliseconds(end - start)));
  target.append(bar, scale);

  const total = (kind) => parts.filter((p) => p.kind === kind).reduce((sum, p) => sum + p.end - p.start, 0);
  const rows = [
    ["Time to first token", request.firstToken !== null && request.arrival !== null ? milliseconds(request.firstToken - request.arrival) : "–"],
    ["of which in the queue", milliseconds(total("queue"))],
    ["Prefill", `${milliseconds(total("prefill"))}${request.prompt ? ` for ${request.prompt} prompt tokens` : ""}${request.reused ? `, ${request.reused} found computed` : ""}`],
    ["Decode", `${milliseconds(total("decode"))} for ${request.tokens} tokens`],
    ["Longest gap between tokens", milliseconds(request.worstGap)],
  ];
  if (request.preemptions) rows.push(["Preempted", `${request.preemptions} times, ${milliseconds(total("preempted"))}`]);
  const list = element("dl", "");
  for (const [term, value] of rows) list.append(element("dt", "", term), element("dd", "", value));
  target.append(list);

  if (request.slowest) {
    const slow = element("button", "", `Go to its slowest step (${request.slowest.number.toLocaleString("en")}, ${milliseconds(request.slowest.seconds)})`);
    slow.type = "button";
    slow.addEventListener("click", () => onStep(request.slowest.number, request.slot));
    target.append(slow);
  }
}

function phases(request) {
  const parts = [];
  const first = request.segments[0];
  if (first && request.arrival !== null) parts.push({ kind: "queue", start: request.arrival, end: first.start });
  for (const [index, segment] of request.segments.entries()) {
    const next = request.segments[index + 1];
    // A preempted request waits until its next segment begins.
    parts.push({ kind: segment.kind, start: segment.start, end: segment.kind === "preempted" && next ? next.start : segment.end });
  }
  return parts;
}

function state(request) {
  if (request.ended !== null) return { stop: "finished", length: "finished at its length", abort: "gone", error: "failed" }[request.reason] ?? "finished";
  const last = request.segments[request.segments.length - 1];
  return last ? `now in ${NAMES[last.kind]}` : "waiting";
}

function element(name, className, text = "") {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.textContent = text;
  return made;
}
