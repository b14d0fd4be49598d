// The batch as a picture: slots are rows, steps are columns, newest on the right. A strip on top
// shows how long each step took, so a stall is a tower (or, in time scale, a wide column).

import { css, dark, paint, requestHue } from "./colour.js";
import { SHARE } from "./store.js";

const LABELS = 52;
const STRIP = 46;
const AXIS = 20;
const GAP_SECONDS = 0.3;
const GAP_WIDTH = 22;

export class Grid {
  constructor(canvas, tip, { onSelect, onPointerStep }) {
    this.canvas = canvas;
    this.tip = tip;
    this.onSelect = onSelect;
    this.onPointerStep = onPointerStep;
    this.cell = 10;
    this.by = "request";
    this.scale = "steps";
    this.selected = null;
    this.cursor = null;
    this.columns = [];
    canvas.addEventListener("pointermove", (event) => this.hover(event));
    canvas.addEventListener("pointerleave", () => this.hideTip());
    canvas.addEventListener("click", (event) => this.click(event));
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  rowHeight(store) {
    return Math.max(4, Math.min(24, Math.floor(320 / store.slots)));
  }

  // Draws the steps up to and including index `right`.
  draw(store, right) {
    this.store = store;
    const width = this.canvas.clientWidth;
    const row = this.rowHeight(store);
    const height = STRIP + row * store.slots + AXIS;
    const ratio = devicePixelRatio || 1;
    if (this.canvas.width !== Math.round(width * ratio) || this.canvas.height !== Math.round(height * ratio)) {
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(height * ratio);
      this.canvas.style.height = `${height}px`;
    }
    const context = this.canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    this.columns = this.layout(store, right, width);
    this.frame(context, store, width, row);
    this.strip(context);
    this.cells(context, store, row);
    this.axis(context, store, width, STRIP + row * store.slots);
    if (this.cursor) this.ring(context, row);
  }

  // Which step stands where: from the right edge leftwards.
  layout(store, right, width) {
    const columns = [];
    let x = width;
    const seconds = this.scale === "time" ? this.secondsPerPixel(store, right) : 0;
    for (let index = right; index >= 0 && x > LABELS; index -= 1) {
      const step = store.steps[index];
      const wide = seconds ? Math.max(1, step.seconds / seconds) : this.cell;
      x -= wide;
      columns.push({ step, index, x, width: wide });
      if (step.idle > GAP_SECONDS) x -= GAP_WIDTH;
    }
    return columns.reverse();
  }

  // Time scale: the median step is as wide as a column would be.
  secondsPerPixel(store, right) {
    const recent = store.steps.slice(Math.max(0, right - 200), right + 1).map((step) => step.seconds);
    recent.sort((a, b) => a - b);
    return Math.max(1e-4, recent[recent.length >> 1] ?? 0.01) / this.cell;
  }

  frame(context, store, width, row) {
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.textAlign = "right";
    const every = Math.max(1, Math.ceil(14 / row));
    for (let slot = 0; slot < store.slots; slot += 1) {
      const y = STRIP + slot * row;
      context.fillStyle = css("--track");
      context.fillRect(LABELS, y + 1, width - LABELS, row - 2);
      if (slot % every === 0) {
        context.fillStyle = css("--muted");
        context.fillText(slot === 0 ? "slot 0" : String(slot), LABELS - 6, y + row / 2);
      }
    }
  }

  strip(context) {
    const times = this.columns.map((column) => column.step.seconds).sort((a, b) => a - b);
    const top = Math.max(0.005, times[times.length - 1] ?? 0);
    context.save();
    context.beginPath();
    context.rect(LABELS, 0, this.canvas.clientWidth - LABELS, STRIP);
    context.clip();
    for (const { step, x, width } of this.columns) {
      const high = (STRIP - 10) * (step.seconds / top);
      const rows = step.prefill + step.decode || 1;
      const prefill = high * (step.prefill / rows);
      const w = Math.max(1, width - (width > 4 ? 1 : 0));
      context.fillStyle = css("--decode");
      context.fillRect(x, STRIP - 4 - high, w, high - prefill);
      context.fillStyle = css("--prefill");
      context.fillRect(x, STRIP - 4 - prefill, w, prefill);
    }
    context.restore();
    context.fillStyle = css("--muted");
    context.textAlign = "right";
    context.fillText(milliseconds(top), LABELS - 6, 10);
    context.fillText("0", LABELS - 6, STRIP - 6);
  }

  cells(context, store, row) {
    context.save();
    context.beginPath();
    context.rect(LABELS, STRIP, this.canvas.clientWidth - LABELS, row * store.slots);
    context.clip();
    const inset = row > 9 ? 2 : 1;
    for (const { step, x, width } of this.columns) {
      if (step.idle > GAP_SECONDS) this.gap(context, x, step.idle, row * store.slots);
      context.fillStyle = css("--warm");
      for (const slot of step.warm ?? []) context.fillRect(x, STRIP + (slot + 0.5) * row - 1, width, 2);
      for (const share of step.shares) {
        const request = store.requests.get(share[SHARE.id]);
        if (!request) continue;
        const kind = share[SHARE.kind];
        const y = STRIP + share[SHARE.slot] * row + inset;
        const high = row - 2 * inset;
        const first = request.firstStep === step.number;
        const last = request.finishStep === step.number;
        const hue = requestHue(request, kind, this.by, store.tenants);
        const lit = this.selected === null || this.selected === request.id;
        const left = first ? 1 : 0;
        const wide = width - left - (last ? 2 : width > 5 ? 0.6 : 0);
        context.globalAlpha = lit ? 1 : 0.22;
        context.fillStyle = paint(hue, kind === "prefill" ? 0.45 : 1);
        context.beginPath();
        const round = Math.min(4, high / 2, wide / 2);
        context.roundRect(x + left, y, wide, high, [first ? round : 0, last ? round : 0, last ? round : 0, first ? round : 0]);
        context.fill();
        if (kind === "prefill") {
          // What it found computed, as its part of the prompt so far: from the top, without the hatch.
          const reused = step.reused?.[request.id] ?? 0;
          const found = high * (reused / (reused + share[SHARE.tokens]));
          this.hatch(context, x + left, y + found, wide, high - found, paint(hue, 1));
        }
        if (last && width > 4) this.dot(context, x + left + wide - Math.min(4, wide / 2), y + high / 2, Math.min(2, high / 4));
      }
      context.globalAlpha = 1;
      for (const mark of step.marks) this.mark(context, x, STRIP + mark.slot * row, row);
    }
    context.restore();
  }

  hatch(context, x, y, width, height, colour) {
    context.save();
    context.beginPath();
    context.rect(x, y, width, height);
    context.clip();
    context.strokeStyle = colour;
    context.lineWidth = 1.6;
    context.beginPath();
    // Anchored to the canvas, so that the pattern runs on from cell to cell.
    for (let at = Math.floor((x - height) / 5) * 5; at < x + width; at += 5) {
      context.moveTo(at, y + height);
      context.lineTo(at + height, y);
    }
    context.stroke();
    context.restore();
  }

  dot(context, x, y, radius) {
    context.fillStyle = dark() ? "#0b0f17" : "#ffffff";
    context.beginPath();
    context.arc(x, y, radius, 0, 2 * Math.PI);
    context.fill();
  }

  mark(context, x, y, row) {
    context.fillStyle = css("--bad");
    context.beginPath();
    context.moveTo(x - 1, y + 1);
    context.lineTo(x - 1, y + row - 1);
    context.lineTo(x - Math.min(8, row * 0.7) - 1, y + row / 2);
    context.fill();
  }

  gap(context, x, seconds, height) {
    context.save();
    context.fillStyle = css("--panel");
    context.fillRect(x - GAP_WIDTH, STRIP, GAP_WIDTH, height);
    context.fillStyle = css("--muted");
    context.translate(x - GAP_WIDTH / 2, STRIP + height / 2);
    context.rotate(-Math.PI / 2);
    context.textAlign = "center";
    context.fillText(`idle for ${seconds < 90 ? `${seconds.toFixed(1)} s` : `${Math.round(seconds / 60)} min`}`, 0, 0);
    context.restore();
  }

  axis(context, store, width, y) {
    context.fillStyle = css("--muted");
    context.textAlign = "center";
    let free = LABELS;
    const every = [1, 2, 5, 10, 20, 50, 100, 200, 500].find((n) => n * this.cell >= 70) ?? 1000;
    for (const { step, x, width: wide } of this.columns) {
      const at = x + wide / 2;
      if (step.number % every || at < free + 30 || at > width - 24) continue;
      context.fillRect(at - 0.5, y, 1, 4);
      context.fillText(step.number.toLocaleString("en"), at, y + 12);
      free = at + 34;
    }
    context.textAlign = "right";
    context.fillText("step", LABELS - 6, y + 12);
  }

  ring(context, row) {
    const column = this.columns.find(({ step }) => step.number === this.cursor.number);
    if (!column) return;
    context.strokeStyle = css("--text");
    context.lineWidth = 2;
    context.strokeRect(column.x - 1, STRIP + this.cursor.slot * row, Math.max(6, column.width) + 1, row);
  }

  // What lies under a point of the canvas.
  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const x = event.clientX - box.left;
    const y = event.clientY - box.top;
    const column = this.columns.find((c) => x >= c.x && x < c.x + c.width);
    if (!column) return null;
    const slot = Math.floor((y - STRIP) / this.rowHeight(this.store));
    const share = column.step.shares.find((s) => s[SHARE.slot] === slot);
    return { ...column, slot, share, inGrid: slot >= 0 && slot < this.store.slots };
  }

  hover(event) {
    const hit = this.store && this.at(event);
    if (!hit) return this.hideTip();
    this.tip.textContent = "";
    for (const line of describe(this.store, hit)) {
      const paragraph = document.createElement("span");
      paragraph.textContent = line;
      this.tip.append(paragraph);
    }
    this.tip.hidden = false;
    const stage = this.canvas.parentElement.getBoundingClientRect();
    const left = Math.min(event.clientX - stage.left + 14, stage.width - this.tip.offsetWidth - 4);
    this.tip.style.left = `${Math.max(0, left)}px`;
    this.tip.style.top = `${event.clientY - stage.top + 16}px`;
    this.canvas.style.cursor = hit.share ? "pointer" : "default";
    return undefined;
  }

  hideTip() {
    this.tip.hidden = true;
  }

  click(event) {
    const hit = this.store && this.at(event);
    if (hit) this.onSelect(hit.share ? hit.share[SHARE.id] : null);
  }

  key(event) {
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (!this.store?.steps.length) return;
    if (moves[event.key]) {
      event.preventDefault();
      this.move(...moves[event.key]);
    } else if (event.key === "Enter" && this.cursor) {
      event.preventDefault();
      const step = this.store.steps[this.store.indexOf(this.cursor.number)];
      const share = step?.shares.find((s) => s[SHARE.slot] === this.cursor.slot);
      this.onSelect(share ? share[SHARE.id] : null);
    } else if (event.key === "Escape") {
      this.cursor = null;
      this.onSelect(null);
    }
  }

  move(columns, rows) {
    const rightmost = this.columns[this.columns.length - 1];
    const from = this.cursor ?? { number: rightmost.step.number, slot: 0 };
    const index = Math.max(0, Math.min(this.store.steps.length - 1, this.store.indexOf(from.number) + (this.cursor ? columns : 0)));
    const slot = Math.max(0, Math.min(this.store.slots - 1, from.slot + (this.cursor ? rows : 0)));
    const step = this.store.steps[index];
    this.cursor = { number: step.number, slot };
    const share = step.shares.find((s) => s[SHARE.slot] === slot);
    this.onPointerStep(index, describe(this.store, { step, slot, share, inGrid: true }).join(", "));
  }
}

function describe(store, { step, slot, share, inGrid }) {
  const took = `step ${step.number.toLocaleString("en")} took ${milliseconds(step.seconds)}`;
  if (!inGrid) return [took, `${step.prefill} prefill rows, ${step.decode} decode rows`, `${step.running} running, ${step.waiting} waiting`];
  if (!share) return [`slot ${slot}: ${step.warm?.includes(slot) ? "free, and remembers what it computed" : "nobody"}`, took];
  const request = store.requests.get(share[SHARE.id]);
  const work = share[SHARE.kind] === "prefill"
    ? `prefill: tokens ${share[SHARE.start]} to ${share[SHARE.start] + share[SHARE.tokens] - 1} of its prompt`
    : `decode: ${request?.prompt ? `output token ${share[SHARE.start] - request.prompt + 2}` : "one token"}`;
  const reused = step.reused?.[share[SHARE.id]];
  const found = reused ? [`${reused} tokens before them were found computed`] : [];
  return [`slot ${slot}: ${shortId(share[SHARE.id])} of ${share[SHARE.tenant]}`, work, ...found, took];
}

export function shortId(id) {
  return id.length > 22 ? `${id.slice(0, 17)}…${id.slice(-3)}` : id;
}

export function milliseconds(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds >= 10) return `${seconds.toFixed(1)} s`;
  if (seconds >= 1) return `${seconds.toFixed(2)} s`;
  return `${(seconds * 1000).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
}
