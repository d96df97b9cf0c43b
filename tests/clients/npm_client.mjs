// The official client for Node. Argument: the server's URL.
import assert from "node:assert";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const asked = { model: "m", messages: [{ role: "user", content: "hi" }], max_tokens: 6, seed: 1 };
const whole = await client.chat.completions.create(asked);
let text = "";
for await (const part of await client.chat.completions.create({ ...asked, stream: true })) {
  text += part.choices[0]?.delta?.content ?? "";
}
assert.equal(text, whole.choices[0].message.content);
const tools = [{ type: "function", function: { name: "go", parameters: { type: "object", properties: {}, additionalProperties: false } } }];
const runner = client.chat.completions.stream({ ...asked, tools, tool_choice: "required", max_tokens: 400 });
assert.equal((await runner.finalChatCompletion()).choices[0].message.tool_calls[0].function.name, "go");
const completion = await client.completions.create({ model: "m", prompt: "x", max_tokens: 3, logprobs: 1, echo: true });
assert.equal(completion.choices[0].logprobs.token_logprobs[0], null);
await assert.rejects(client.models.retrieve("nope"), OpenAI.NotFoundError);
console.log("npm openai ok");
