// What the page knows about one engine, grown step by step: steps, requests, per-second figures.

const HISTORY_SECONDS = 600;
// What a browser can hold with ease; reached only with very many slots.
const MAX_SHARES = 600_000;

// Fields of a share as the server sends them.
export const SHARE = { id: 0, tenant: 1, slot: 2, kind: 3, start: 4, tokens: 5, sampled: 6 };

export class EngineStore {
  constructor(info) {
    this.info = info;
    this.steps = [];
    this.requests = new Map();
    this.seconds = new Map();
    this.queue = {};
    this.tenants = [];
    this.shares = 0;
    this.version = 0;
  }

  get slots() { return this.info.slots; }
  get last() { return this.steps[this.steps.length - 1]; }

  // Takes steps in order; those already known (a reconnect sends some again) are ignored.
  add(step) {
    const last = this.last;
    if (last && step.number <= last.number) {
      // An engine that was restarted counts from zero again.
      if (step.started <= last.end) return;
      this.steps = [];
      this.shares = 0;
    }
    const tail = step.intervals[step.intervals.length - 1];
    step.seconds = tail ? tail[1] + tail[2] : 0;
    step.end = step.started + step.seconds;
    step.prefill = 0;
    step.decode = 0;
    step.marks = [];
    step.idle = last ? Math.max(0, step.started - last.end) : 0;
    for (const [id, tenant, arrival, prompt, max] of step.arrived ?? []) {
      Object.assign(this.request(id, tenant), { arrival, prompt, max });
    }
    for (const id of Object.keys(step.preempted ?? {})) this.preempt(id, step);
    for (const [id, tokens] of Object.entries(step.reused ?? {})) {
      if (this.requests.has(id)) this.requests.get(id).reused += tokens;
    }
    for (const share of step.shares) this.serve(share, step);
    for (const id of step.finished) this.finish(id, step);
    for (const [id, reason, end] of step.ended ?? []) this.end(id, reason, end);
    this.count(step);
    this.queue = step.queue ?? {};
    this.steps.push(step);
    this.shares += step.shares.length;
    this.version += 1;
    this.forget(step.end);
  }

  request(id, tenant) {
    let request = this.requests.get(id);
    if (!request) {
      if (!this.tenants.includes(tenant)) this.tenants.push(tenant);
      request = {
        id, tenant, arrival: null, prompt: null, max: null, number: this.requests.size + (this.dropped ?? 0),
        segments: [], firstStep: null, lastStep: null, slowest: null, tokens: 0, firstToken: null,
        lastToken: null, worstGap: 0, preemptions: 0, reused: 0, reason: null, ended: null, slot: null, seen: 0,
      };
      this.requests.set(id, request);
    }
    return request;
  }

  serve(share, step) {
    const kind = share[SHARE.kind];
    const request = this.request(share[SHARE.id], share[SHARE.tenant]);
    step[kind] += share[SHARE.tokens];
    request.slot = share[SHARE.slot];
    request.seen = step.end;
    request.firstStep ??= step.number;
    request.lastStep = step.number;
    if (!request.slowest || step.seconds > request.slowest.seconds) request.slowest = step;
    let segment = request.segments[request.segments.length - 1];
    if (!segment || segment.kind !== kind) {
      const start = kind === "decode" && segment ? segment.end : step.started;
      segment = { kind, slot: request.slot, start, end: step.end, firstStep: step.number, lastStep: step.number, tokens: 0 };
      request.segments.push(segment);
    }
    segment.end = step.end;
    segment.lastStep = step.number;
    segment.tokens += share[SHARE.tokens];
    if (share[SHARE.sampled]) this.token(request, step);
  }

  token(request, step) {
    const second = this.second(step.end);
    second.tokens += 1;
    if (request.firstToken === null && request.tokens === 0) {
      request.firstToken = step.end;
      if (request.arrival !== null) second.ttft.push(step.end - request.arrival);
    } else if (request.lastToken !== null) {
      const gap = step.end - request.lastToken;
      request.worstGap = Math.max(request.worstGap, gap);
      second.itl.push(gap);
    }
    request.tokens += 1;
    request.lastToken = step.end;
  }

  preempt(id, step) {
    const request = this.requests.get(id);
    if (!request || request.slot === null) return;
    request.preemptions += 1;
    step.marks.push({ slot: request.slot, kind: "preempted", id });
    request.segments.push({ kind: "preempted", slot: null, start: step.started, end: step.started, firstStep: step.number, lastStep: step.number, tokens: 0 });
    request.slot = null;
  }

  finish(id, step) {
    const request = this.requests.get(id);
    if (!request) return;
    request.ended ??= step.end;
    request.finishStep = step.number;
  }

  end(id, reason, end) {
    const request = this.requests.get(id);
    if (!request) return;
    request.reason = reason;
    request.ended ??= end;
  }

  // Busy slot-seconds are spread over the seconds that a step covers.
  count(step) {
    const busy = new Set(step.shares.map((share) => share[SHARE.slot])).size;
    for (let at = step.started; at < step.end;) {
      const edge = Math.min(step.end, Math.floor(at) + 1);
      this.second(at).busy += busy * (edge - at);
      at = edge;
    }
    this.second(step.end).waiting = step.waiting;
  }

  second(at) {
    const key = Math.floor(at);
    let second = this.seconds.get(key);
    if (!second) {
      second = { tokens: 0, busy: 0, ttft: [], itl: [], waiting: null };
      this.seconds.set(key, second);
    }
    return second;
  }

  forget(now) {
    const horizon = now - HISTORY_SECONDS;
    let old = 0;
    let shares = this.shares;
    while (old < this.steps.length - 1 && (this.steps[old].end < horizon || shares > MAX_SHARES)) {
      shares -= this.steps[old].shares.length;
      old += 1;
    }
    // In lumps: cutting the array at every step would copy it at every step.
    if (old < 256) return;
    this.steps.splice(0, old);
    this.shares = shares;
    const oldest = this.steps[0].number;
    for (const [id, request] of this.requests) {
      if (request.ended !== null && (request.lastStep ?? 0) < oldest && request.ended < horizon) {
        this.requests.delete(id);
        this.dropped = (this.dropped ?? 0) + 1;
      }
    }
    for (const key of this.seconds.keys()) if (key < horizon) this.seconds.delete(key);
  }

  // Index of the step with this number, or where it would stand.
  indexOf(number) {
    let low = 0;
    let high = this.steps.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.steps[middle].number < number) low = middle + 1; else high = middle;
    }
    return low;
  }

  // Per-second columns for the charts, from `from` to `to` (whole seconds).
  series(from, to) {
    const x = [], tokens = [], slots = [], ttft50 = [], ttft95 = [], itl50 = [], itl99 = [];
    for (let second = from; second <= to; second += 1) {
      const figures = this.seconds.get(second);
      x.push(second);
      tokens.push(figures?.tokens ?? 0);
      slots.push(figures ? Math.min(100, (100 * figures.busy) / this.slots) : 0);
      ttft50.push(quantile(figures?.ttft, 0.5));
      ttft95.push(quantile(figures?.ttft, 0.95));
      itl50.push(milli(quantile(figures?.itl, 0.5)));
      itl99.push(milli(quantile(figures?.itl, 0.99)));
    }
    return { tokens: [x, tokens], slots: [x, slots], ttft: [x, ttft50, ttft95], itl: [x, itl50, itl99] };
  }

  // The last `share` seconds before `to` in one number each.
  summary(to, share) {
    let tokens = 0, busy = 0;
    const ttft = [], itl = [];
    for (let second = Math.floor(to) - share; second < Math.floor(to); second += 1) {
      const figures = this.seconds.get(second);
      if (!figures) continue;
      tokens += figures.tokens;
      busy += figures.busy;
      ttft.push(...figures.ttft);
      itl.push(...figures.itl);
    }
    return {
      tokens: tokens / share,
      slots: Math.min(1, busy / share / this.slots),
      ttft: quantile(ttft, 0.5),
      itl: quantile(itl, 0.5),
    };
  }
}

function milli(seconds) {
  return seconds === null ? null : seconds * 1000;
}

function quantile(values, share) {
  if (!values || values.length === 0) return null;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
}
