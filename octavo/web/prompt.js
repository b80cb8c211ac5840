// The prompt box. It sends an ordinary request; the page highlights the request by its id.

import { byId as $, count, fewDigits, formatDuration, shortId } from "./draw.js";
import { address, authorization } from "./feed.js";

const reply = $("reply");
const facts = $("facts");
const send = $("send");
let id = null; // The id of the request, after the server has sent it.
let running = null; // An AbortController while a request is in progress.
let numbers = {};

export const isMine = (request) => id !== null && request.startsWith(id);

// Takes the numbers of the request from the state of the engine.
export function followMine(state) {
  if (!running) return;
  for (const seq of state.sequences.values()) {
    if (isMine(seq.request))
      numbers = { ...numbers, blocks: seq.table.length, cached: seq.cached, state: seq.state };
  }
  showFacts();
}

function showFacts() {
  const parts = id ? [`request ${shortId(id)}`] : [];
  if (numbers.state && running) parts.push(numbers.state);
  if (numbers.blocks !== undefined) parts.push(`${count(numbers.blocks)} blocks`);
  if (numbers.cached) parts.push(`${count(numbers.cached)} tokens cached`);
  if (numbers.first) parts.push(`first token after ${formatDuration(1e6 * numbers.first)}`);
  if (numbers.tokens > 1 && numbers.seconds)
    parts.push(`${fewDigits((numbers.tokens - 1) / numbers.seconds)} tokens/s`);
  if (numbers.reason) parts.push(`finish reason: ${numbers.reason}`);
  facts.textContent = parts.join(" · ");
}

// Yields the objects of an event stream as they arrive.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let incomplete = ""; ;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (incomplete + value).split("\n\n");
    incomplete = parts.pop();
    for (const part of parts) {
      if (part === "data: [DONE]") return;
      if (part.startsWith("data: ")) yield JSON.parse(part.slice(6));
    }
  }
}

const post = (path, body) =>
  fetch(address(path), {
    method: "POST",
    headers: { "content-type": "application/json", ...authorization() },
    body: JSON.stringify({
      ...body,
      temperature: 0.7,
      stream: true,
      stream_options: { include_usage: true },
    }),
    signal: running.signal,
  });

async function ask(text, max_tokens, priority) {
  const tokenizer = await fetch(address("tokenizer_info"), { headers: authorization() }).then(
    (r) => (r.ok ? r.json() : {}),
  );
  const startTime = performance.now();
  const response =
    tokenizer.chat_template === null
      ? await post("v1/completions", { prompt: text, max_tokens, ...priority })
      : await post("v1/chat/completions", {
          messages: [{ role: "user", content: text }],
          max_tokens,
          ...priority,
        });
  if (!response.ok) throw new Error((await response.json()).error.message);
  id = response.headers.get("x-request-id");
  let first = 0;
  for await (const event of events(response.body)) {
    if (event.error) throw new Error(event.error.message);
    const choice = event.choices[0];
    const piece = choice?.delta?.content ?? choice?.text ?? "";
    if (piece && !first) {
      first = performance.now();
      numbers.first = (first - startTime) / 1000;
    }
    if (piece) numbers.tokens = (numbers.tokens ?? 0) + 1;
    if (event.usage) {
      Object.assign(numbers, {
        tokens: event.usage.completion_tokens,
        cached: event.usage.prompt_tokens_details?.cached_tokens,
      });
    }
    if (first && piece) numbers.seconds = (performance.now() - first) / 1000;
    if (choice?.finish_reason) numbers.reason = choice.finish_reason;
    reply.append(piece);
    reply.scrollTop = reply.scrollHeight;
    showFacts();
  }
}

$("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (running) return running.abort();
  running = new AbortController();
  [id, numbers] = [null, {}];
  reply.textContent = facts.textContent = "";
  reply.className = "reply";
  send.textContent = "stop";
  try {
    await ask(
      $("prompt").value || $("prompt").placeholder,
      Math.max(1, Number($("max-tokens").value) || 128),
      Number($("priority").value) ? { priority: Number($("priority").value) } : {},
    );
  } catch (error) {
    if (error.name === "AbortError") numbers.reason = "stopped";
    else {
      reply.className = "reply error";
      reply.append(`${reply.textContent ? "\n" : ""}${error.message}`);
    }
  }
  running = null;
  send.textContent = "send";
  showFacts();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    $("form").requestSubmit();
  }
});
