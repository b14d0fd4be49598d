// Wires feed, store, pictures and controls together.

import { Charts } from "./charts.js";
import { dark, paint } from "./colour.js";
import { apiKey, authorized, errorMessage, follow } from "./feed.js";
import { Grid, milliseconds } from "./grid.js";
import { sendPrompt } from "./prompt.js";
import { showRequest } from "./request.js";
import { EngineStore } from "./store.js";

const THEME = "slotserve.theme";
const $ = (id) => document.getElementById(id);
const stores = new Map();
let hello = null;
let current = null;
let paused = false;
// When paused: number of the step at the right edge. Steps may leave the store meanwhile.
let shown = null;
let selected = null;
// Id of the request sent from this page, until it shows up in an engine; "" once it has.
let sent = "";
let dirty = true;

const charts = new Charts();
const grid = new Grid($("grid"), $("tip"), {
  onSelect: select,
  onPointerStep(index, words) {
    if (!paused) pause();
    if (index > rightIndex()) shown = current.steps[index].number;
    if (index < current.indexOf(grid.columns[0].step.number)) shown = current.steps[Math.min(current.steps.length - 1, index + grid.columns.length - 1)].number;
    $("spoken").textContent = words;
    dirty = true;
  },
});

function rightIndex() {
  if (!paused) return current.steps.length - 1;
  return Math.max(0, Math.min(current.steps.length - 1, current.indexOf(shown)));
}

function onMessage(message) {
  if (message.engines) {
    hello = message;
    for (const info of message.engines) {
      const known = stores.get(info.engine);
      if (known) known.info = info;
      else stores.set(info.engine, new EngineStore(info));
    }
    current ??= stores.get(message.engines[0]?.engine) ?? null;
    showFacts();
    return;
  }
  const store = stores.get(message.engine);
  if (!store) return;
  for (const step of message.steps) store.add(step);
  if (sent && store.requests.has(sent)) followSent(store);
  store.now = message.now;
  store.queue = message.queue;
  dirty = true;
}

// The prompt sent from here has reached an engine, maybe another than the one on screen.
function followSent(store) {
  if (store !== current) {
    current = store;
    showFacts();
  }
  select(sent);
  sent = "";
}

function showFacts() {
  const facts = $("facts");
  facts.replaceChildren();
  const info = current?.info;
  const chips = [[hello.model, ""]];
  if (info) {
    chips.push(
      [`mode ${info.mode}`, "How prompts are prefilled"],
      [`policy ${info.policy}`, "Who is next"],
      [`${info.slots} slots`, "Requests that run at once"],
    );
  }
  for (const [text, title] of chips) {
    const chip = document.createElement("span");
    chip.textContent = text;
    chip.title = title;
    facts.append(chip);
  }
  const pick = $("engine");
  pick.replaceChildren(...[...stores.keys()].map((name) => new Option(name, name, false, stores.get(name) === current)));
  $("engine-pick").hidden = stores.size < 2;
}

function legend() {
  const by = grid.by;
  const entries = by === "phase"
    ? [["prefill", paint(70, 0.45), paint(70)], ["decode", paint(250)]]
    : [["prefill (reads the prompt)", paint(250, 0.45), paint(250)], ["decode (one token a step)", paint(250)]];
  const items = entries.map(([text, fill, stripes]) => {
    const item = document.createElement("li");
    const swatch = document.createElement("i");
    swatch.style.background = stripes ? `repeating-linear-gradient(-45deg, ${stripes} 0 2px, ${fill} 2px 5px)` : fill;
    item.append(swatch, text);
    return item;
  });
  const notes = [by === "phase" ? "" : `one colour per ${by}`, "towers: time per step, amber for prefill"];
  for (const note of notes.filter(Boolean)) {
    const item = document.createElement("li");
    item.textContent = note;
    items.push(item);
  }
  for (const [kind, text] of [["warm", "free, and remembers"], ["arrow", "preempted"]]) {
    const item = document.createElement("li");
    const swatch = document.createElement("i");
    swatch.className = kind;
    item.append(swatch, text);
    items.push(item);
  }
  $("legend").replaceChildren(...items);
}

function sentence(step) {
  if (!step) return "No steps yet: send a prompt below.";
  const busy = new Set(step.shares.map((share) => share[2])).size;
  const parts = [`Step ${step.number.toLocaleString("en")} served ${busy} of ${current.slots} slots in ${milliseconds(step.seconds)}`];
  const change = [];
  if (step.admitted.length) change.push(`${step.admitted.length} joined`);
  if (step.finished.length) change.push(`${step.finished.length} finished and freed ${step.finished.length === 1 ? "its slot" : "their slots"}`);
  const lost = Object.keys(step.preempted ?? {}).length;
  if (lost) change.push(`${lost} preempted`);
  if (change.length) parts.push(change.join(", "));
  parts.push(step.waiting ? `${step.waiting} wait` : "nobody waits");
  return `${parts.join("; ")}.`;
}

function draw() {
  requestAnimationFrame(draw);
  if (!current || document.hidden) return;
  const live = !paused && current.now ? current.now : null;
  if (!dirty && !live) return;
  const right = rightIndex();
  const step = current.steps[right];
  if (dirty) {
    $("empty").hidden = current.steps.length > 0;
    $("empty").textContent = "The engine is idle. Send a prompt below, or start a load, and requests appear here as bars.";
    grid.selected = selected;
    grid.draw(current, right);
    scrubber(right);
    if (selected) showRequest($("request"), current, selected, { onStep: goTo });
  }
  slowly(step, live);
  dirty = false;
}

// What a person reads: a few times a second is enough.
let lastSlow = 0;
function slowly(step, live) {
  if (performance.now() - lastSlow < (paused ? 0 : 300)) return;
  lastSlow = performance.now();
  $("sentence").textContent = sentence(step);
  $("grid").setAttribute("aria-label", `The batch, ${current.slots} slots. ${sentence(step)}`);
  const to = paused && step ? step.end + 1 : live ?? (step ? step.end : Date.now() / 1000);
  charts.draw(current, to);
  const now = current.summary(to, 5);
  $("now-tokens").textContent = now.tokens.toFixed(now.tokens < 10 ? 1 : 0);
  $("now-slots").textContent = `${Math.round(now.slots * 100)} %`;
  $("now-ttft").textContent = milliseconds(now.ttft);
  $("now-itl").textContent = milliseconds(now.itl);
  queue(paused && step ? step.queue : current.queue);
  memory(step);
  table(step);
}

function scrubber(right) {
  const slider = $("scrub");
  const first = current.steps[0]?.number ?? 0;
  slider.min = first;
  slider.max = current.last?.number ?? 0;
  slider.value = current.steps[right]?.number ?? 0;
  const step = current.steps[right];
  const behind = step && current.last ? current.last.end - step.end : 0;
  $("when").textContent = !step ? "" : paused ? `${behind.toFixed(1)} s back` : "live";
  slider.setAttribute("aria-valuetext", step ? `step ${step.number}, ${behind.toFixed(1)} seconds back` : "");
  $("play").textContent = paused ? "Back to live" : "Pause";
}

function queue(waiting) {
  const entries = Object.entries(waiting ?? {}).sort((a, b) => b[1] - a[1]);
  const target = $("queue");
  if (!entries.length) {
    target.replaceChildren(Object.assign(document.createElement("p"), { className: "muted", textContent: "Nobody waits." }));
    return;
  }
  const most = Math.max(...entries.map(([, count]) => count), current.slots);
  const list = document.createElement("ul");
  for (const [tenant, count] of entries.slice(0, 12)) {
    const item = document.createElement("li");
    const name = Object.assign(document.createElement("span"), { textContent: tenant });
    const bar = document.createElement("i");
    bar.style.width = `${(100 * count) / most}%`;
    const track = document.createElement("span");
    track.className = "track";
    track.append(bar);
    item.append(name, track, Object.assign(document.createElement("b"), { textContent: count }));
    list.append(item);
  }
  target.replaceChildren(list);
  if (entries.length > 12) target.append(`and ${entries.length - 12} more tenants`);
}

// Free slots with waiting requests beside them mean that this is full.
function memory(step) {
  const share = step?.kv_budget ? Math.min(1, step.kv_tokens / step.kv_budget) : 0;
  $("memory").style.width = `${100 * share}%`;
  $("memory-text").textContent = step ? `${step.kv_tokens.toLocaleString("en")} of ${step.kv_budget.toLocaleString("en")} tokens` : "";
}

function table(step) {
  const body = $("steps");
  if (!step || !body.closest("details").open) return;
  const right = rightIndex();
  const rows = current.steps.slice(Math.max(0, right - 19), right + 1).reverse().map((s) => {
    const row = document.createElement("tr");
    const values = [s.number, milliseconds(s.seconds), s.prefill, s.decode, s.running, s.waiting, s.admitted.length, s.finished.length, Object.keys(s.preempted ?? {}).length, s.kv_tokens];
    for (const value of values) row.append(Object.assign(document.createElement("td"), { textContent: value }));
    return row;
  });
  body.replaceChildren(...rows);
}

function select(id) {
  selected = id;
  if (!id) {
    $("request").replaceChildren(Object.assign(document.createElement("p"), { className: "muted", textContent: "Click a bar in the batch, or press Enter on it, to see where its time went." }));
  }
  dirty = true;
}

function pause() {
  if (!current?.steps.length) return;
  paused = true;
  shown = current.last.number;
  dirty = true;
}

function resume() {
  paused = false;
  shown = null;
  grid.cursor = null;
  dirty = true;
}

function goTo(number, slot) {
  paused = true;
  const ahead = Math.floor(grid.columns.length / 2);
  const index = Math.min(current.steps.length - 1, current.indexOf(number) + ahead);
  shown = current.steps[index].number;
  grid.cursor = { number, slot: slot ?? 0 };
  $("grid").focus({ preventScroll: true });
  dirty = true;
}

function askForKey() {
  const dialog = $("key-dialog");
  $("key").value = "";
  dialog.showModal();
  return new Promise((resolve) => {
    $("key-form").addEventListener("submit", () => {
      apiKey.set($("key").value.trim());
      resolve();
    }, { once: true });
  });
}

$("key-dialog").addEventListener("cancel", (event) => event.preventDefault());
$("play").addEventListener("click", () => (paused ? resume() : pause()));
$("scrub").addEventListener("input", (event) => {
  const number = Number(event.target.value);
  if (current?.last && number >= current.last.number) return resume();
  paused = true;
  shown = number;
  dirty = true;
  return undefined;
});
$("engine").addEventListener("change", (event) => {
  current = stores.get(event.target.value);
  select(null);
  resume();
  showFacts();
});
$("colour").addEventListener("change", (event) => { grid.by = event.target.value; legend(); dirty = true; });
$("scale").addEventListener("change", (event) => { grid.scale = event.target.value; dirty = true; });
$("zoom-in").addEventListener("click", () => { grid.cell = Math.min(40, Math.round(grid.cell * 1.4)); dirty = true; });
$("zoom-out").addEventListener("click", () => { grid.cell = Math.max(3, Math.round(grid.cell / 1.4)); dirty = true; });
addEventListener("resize", () => { dirty = true; });
document.addEventListener("visibilitychange", () => { dirty = true; });
document.addEventListener("keydown", (event) => {
  if (event.key !== " " || event.target.closest("input, textarea, select, button, summary, dialog")) return;
  event.preventDefault();
  if (paused) resume(); else pause();
});

function repaint() {
  $("theme").textContent = dark() ? "Light" : "Dark";
  legend();
  charts.repaint();
  dirty = true;
}
$("theme").addEventListener("click", () => {
  localStorage.setItem(THEME, dark() ? "light" : "dark");
  useTheme();
});
// The theme is what was chosen here, or else what the system prefers.
function useTheme() {
  document.documentElement.dataset.theme = localStorage.getItem(THEME) ?? (prefersDark.matches ? "dark" : "light");
  repaint();
}

$("prompt-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const answer = $("answer");
  answer.textContent = "";
  answer.classList.remove("bad");
  $("send").disabled = true;
  sent = null;
  if (paused) resume();
  try {
    await sendPrompt({
      prompt: $("prompt").value,
      maxTokens: Number($("max-tokens").value),
      model: hello?.model,
      onId: (id) => { sent ??= id; },
      onText: (text) => { answer.textContent += text; },
    });
  } catch (error) {
    answer.textContent = error.message;
    answer.classList.add("bad");
  } finally {
    $("send").disabled = false;
  }
});

$("trace").addEventListener("click", async () => {
  const response = await fetch("trace?seconds=120", authorized());
  notice(response.ok ? null : await errorMessage(response));
  if (!response.ok) return;
  const link = document.createElement("a");
  link.href = URL.createObjectURL(await response.blob());
  link.download = "slotserve-trace.json";
  link.click();
  URL.revokeObjectURL(link.href);
});

function notice(text) {
  $("notice").textContent = text ?? "";
  $("notice").hidden = !text;
}

const prefersDark = matchMedia("(prefers-color-scheme: dark)");
prefersDark.addEventListener("change", useTheme);
useTheme();
requestAnimationFrame(draw);
follow({
  onMessage,
  onState: ({ error }) => notice(error),
  onUnauthorized: askForKey,
});
