// The stream of steps: lines of JSON over one fetch, reopened when it breaks.

const KEY = "slotserve.key";

export const apiKey = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => sessionStorage.setItem(KEY, value),
};

export function authorized(options = {}) {
  const key = apiKey.get();
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  return { ...options, headers };
}

// Lines of a response body as they come.
export async function* lines(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n");
    rest = parts.pop();
    yield* parts;
  }
}

export async function errorMessage(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

// Calls `onMessage` with every message; `onState` with {ok} or {error} when the connection changes;
// `onUnauthorized` must resolve when there is a new key to try.
export async function follow({ onMessage, onState, onUnauthorized }) {
  let connected = false;
  for (let pause = 500; ; pause = Math.min(8000, pause * 2)) {
    try {
      const response = await fetch("live", authorized());
      if (response.status === 401) {
        await onUnauthorized();
        pause = 250;
        continue;
      }
      if (!response.ok) throw new Error(await errorMessage(response));
      for await (const line of lines(response)) {
        if (!line) continue;
        if (!connected) onState({ ok: true });
        connected = true;
        pause = 500;
        onMessage(JSON.parse(line));
      }
      throw new Error("the server closed the stream");
    } catch (error) {
      connected = false;
      onState({ error: `Not connected: ${error.message}. Trying again.` });
      await new Promise((resolve) => setTimeout(resolve, pause));
    }
  }
}
