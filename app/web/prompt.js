// Sends a prompt like any client, streams the answer, and tells which request it became.

import { authorized, errorMessage, lines } from "./feed.js";

export async function sendPrompt({ prompt, maxTokens, model, onId, onText }) {
  const response = await fetch("v1/chat/completions", authorized({
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({
      model,
      messages: [{ role: "user", content: prompt }],
      max_completion_tokens: maxTokens,
      stream: true,
    }),
  }));
  if (!response.ok) throw new Error(await errorMessage(response));
  for await (const line of lines(response)) {
    if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
    const chunk = JSON.parse(line.slice(6));
    if (chunk.error) throw new Error(chunk.error.message);
    onId(chunk.id);
    onText(chunk.choices[0]?.delta?.content ?? "");
  }
}
