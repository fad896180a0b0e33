// Requests to the server that the page came from.

const KEY = "bd3lm-key";

export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** Keep the key until the tab is closed. */
export const keepKey = (key) => sessionStorage.setItem(KEY, key);

export const hasKey = () => sessionStorage.getItem(KEY) !== null;

const headers = () => {
  const key = sessionStorage.getItem(KEY);
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
};

const request = async (path, options) => {
  let answer;
  try {
    answer = await fetch(path, { ...options, headers: headers(), cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server does not answer.", 0);
  }
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => null);
  throw new ServerError(told?.error?.message ?? `The server answered with status ${answer.status}.`, answer.status);
};

/** The served model. */
export const model = async () => {
  const { data } = await (await request("v1/models")).json();
  return { name: data[0].id, ...data[0].bd3lm };
};

/** The chunks of an answer, as the server sends them. */
export async function* chunks(path, body, signal) {
  const asked = { ...body, stream: true, events: true, stream_options: { include_usage: true } };
  const answer = await request(path, { method: "POST", body: JSON.stringify(asked), signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new ServerError("The connection closed before the answer was complete.", 0);
    const events = (held + value).split("\n\n");
    held = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError(chunk.error.message, 0);
      yield chunk;
    }
  }
}
