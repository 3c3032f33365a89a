// Requests to the server, and answers as they arrive.
"use strict";

const NUMBERS = [
  "temperature", "top_k", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty", "seed", "max_tokens",
];
const BROKEN = "The connection ended before the answer did.";

// Sends a request; `data` is the body to post.
function request(path, data, signal) {
  const key = $("key").value.trim();
  const headers = { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
  return fetch(path, { headers, signal, ...(data && { method: "POST", body: JSON.stringify(data) }) });
}

// Builds the request for the next message of a chat. Throws a SyntaxError if the schema is not valid JSON.
function fieldsOf({ system, messages }) {
  const first = system.trim() ? [{ role: "system", content: system }] : [];
  const schema = $("json_schema").value.trim();
  const numbers = NUMBERS.filter((id) => $(id).value !== "").map((id) => [id, Number($(id).value)]);
  return {
    messages: [...first, ...messages].map(({ role, content }) => ({ role, content })),
    stream: true,
    stream_options: { include_usage: true },
    timings_per_token: true,
    return_progress: true,
    return_drafts: true,
    ...(schema && { response_format: { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(schema) } } }),
    ...Object.fromEntries(numbers),
  };
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
  }
}

async function refusal(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text || `${response.status} ${response.statusText}`;
  }
}

// Reads the answer to a chat into a message, and calls `progress` whenever it has grown.
//
// Returns {done, fault, keyless}: whether it is complete, an error message, and whether an API key is missing.
async function receive(chat, answer, signal, progress) {
  const seen = { reading: "Reading …", begun: false };
  answer.note = seen.reading;
  progress();
  let ending;
  try {
    ending = await read(chat, answer, signal, seen, progress);
  } catch (error) {
    ending = { fault: signal.aborted ? "" : faultOf(error, seen.begun) };
  }
  if (!ending.done) seen.reason = signal.aborted ? "stopped" : "interrupted";
  answer.note = summary(seen);
  return ending;
}

async function read(chat, answer, signal, seen, progress) {
  const response = await request("v1/chat/completions", fieldsOf(chat), signal);
  if (!response.ok) return { fault: await refusal(response), keyless: response.status === 401 };
  seen.begun = true;
  const thoughts = grower(answer, "reasoning_content", "thoughts_drafted");
  const content = grower(answer, "content", "drafted");
  for await (const data of events(response)) {
    if (data === "[DONE]") return { done: true };
    const chunk = JSON.parse(data);
    if (chunk.error) return { fault: chunk.error.message };
    const choice = chunk.choices?.[0];
    thoughts(choice?.delta?.reasoning_content, choice?.drafted);
    content(choice?.delta?.content, choice?.drafted);
    seen.timings = chunk.timings ?? seen.timings;
    seen.usage = chunk.usage ?? seen.usage;
    if (choice?.finish_reason === "length") seen.reason = "stopped at the token limit";
    const { processed, total } = chunk.prompt_progress ?? {};
    if (total) seen.reading = `Reading, ${processed} of ${total} tokens`;
    answer.note = seen.timings?.predicted_n ? summary(seen) : seen.reading;
    progress();
  }
  return { fault: BROKEN };
}

function faultOf(error, begun) {
  if (error instanceof SyntaxError && !begun) return `JSON schema: ${error.message}`;
  if (!(error instanceof TypeError)) return error.message;
  return begun ? BROKEN : "The server cannot be reached.";
}

// Adds a piece to a field of an answer, and its drafted spans (in code points) to the marks.
function grower(answer, field, marks) {
  let length = Array.from(answer[field]).length;
  return (piece, drafted) => {
    if (!piece) return;
    for (const [start, end] of drafted ?? []) {
      const last = answer[marks].at(-1);
      if (last?.[1] === length + start) last[1] = length + end;
      else answer[marks].push([length + start, length + end]);
    }
    answer[field] += piece;
    length += Array.from(piece).length;
  };
}

// Builds the note below an answer.
function summary({ timings, usage, reason }) {
  const parts = [];
  const tokens = usage?.completion_tokens ?? timings?.predicted_n;
  if (tokens !== undefined) parts.push(tokens === 1 ? "1 token" : `${tokens} tokens`);
  if (timings?.predicted_per_second) parts.push(`${timings.predicted_per_second.toFixed(1)} tokens/s`);
  if (timings?.gain) parts.push(`gain ${timings.gain.toFixed(2)}×`);
  if (timings?.draft_n) parts.push(`${timings.draft_n_accepted} of ${timings.draft_n} drafted tokens accepted`);
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  if (cached) parts.push(`${cached} of ${usage.prompt_tokens} prompt tokens reused`);
  if (usage && contextSize) parts.push(`${usage.total_tokens} of ${contextSize} tokens of context`);
  if (reason) parts.push(reason);
  return parts.join(" · ");
}
