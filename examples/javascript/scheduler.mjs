// A scheduler of some 130 lines. It shares no code with gpuworker: all it knows is in
// docs/protocol.md and docs/messages.md.
//
//     node scheduler.mjs ENDPOINT '[504, 3575, 282]' [MAX_TOKENS]
//     node scheduler.mjs ENDPOINT prompt.json [MAX_TOKENS]
//
// It leads the worker from wherever it is to serving, generates greedily from the prompt with two
// steps in flight, lets the worker sleep and wake, generates again, and shuts it down.
import { readFileSync } from "node:fs";
import { Dealer } from "zeromq";
import { decode, encode } from "@msgpack/msgpack";

const VERSION = 1, REQUEST = 1, REPLY = 2, BLOCKS = 64;
const [endpoint, promptText = "[1, 2, 3]", maxTokens = "16"] = process.argv.slice(2);

class Worker {
  socket = new Dealer({ linger: 0, sendHighWaterMark: 64 });
  waiting = new Map(); // corr -> {resolve, reject}
  corr = 0;
  epoch = 0;
  seq = 0;
  bootId = undefined;

  constructor(endpoint) {
    // It is tried until somebody is there; but once lost is lost, the next one may be another.
    // What it said before it left has arrived and is read within this moment.
    this.socket.events.on("disconnect", () =>
      setTimeout(() => this.lose("connection_lost", "the worker went away"), 100));
    this.socket.connect(endpoint);
    this.receive().catch((error) => this.lose("protocol_error", error.message));
  }

  // Whatever was not answered has an unknown outcome, and nothing more is said.
  lose(code, message) {
    this.lost ??= Object.assign(Error(message), { code });
    for (const { reject } of this.waiting.values()) reject(this.lost);
    this.waiting.clear();
  }

  // Send a message and promise its reply, as an array of fields behind the tag.
  ask(tag, ...fields) {
    if (this.lost) return Promise.reject(this.lost);
    const seq = tag === "execute_model" ? ++this.seq : 0;
    const header = Buffer.concat([
      Buffer.from([0x47, 0x57, VERSION]), // "GW"
      encode([REQUEST, ++this.corr, this.epoch, seq, 0]),
    ]);
    const reply = new Promise((resolve, reject) => this.waiting.set(this.corr, { resolve, reject }));
    // One send at a time, in order: zeromq.js refuses a second one before the first is done.
    this.sending = (this.sending ?? Promise.resolve()).then(() =>
      this.socket.send([header, encode([tag, ...fields])]));
    reply.catch(() => {}); // a step behind one that failed is aborted; whoever awaits it is told
    return reply;
  }

  async receive() {
    for await (const [header, body] of this.socket) {
      if (header.toString("latin1", 0, 2) !== "GW" || header[2] !== VERSION) throw Error("no reply");
      const [kind, corr, , , bootId] = decode(header.subarray(3));
      if (kind !== REPLY || (this.bootId && bootId !== this.bootId)) throw Error("another worker");
      const [tag, ...fields] = decode(body);
      if (corr === 0) throw Error(`${fields[0]}: ${fields[1]}`); // concerns the whole connection
      const { resolve, reject } = this.waiting.get(corr) ?? {};
      this.waiting.delete(corr);
      if (tag === "failure") reject?.(Object.assign(Error(fields[1]), { code: fields[0] }));
      else resolve?.(fields);
    }
  }

  // Become the scheduler: one more than the highest epoch that the worker has seen.
  async hello() {
    const health = await this.ask("get_health");
    const session = health[19]; // [highest_epoch, client, live, silent_s]
    const epoch = session[0] + 1;
    const welcome = await this.ask("hello", VERSION, VERSION, epoch, "javascript example");
    [, this.bootId, this.epoch, this.state, this.window] = welcome;
  }
}

// A step of one row: slot 0 computes `scheduled` tokens after `computed` earlier ones.
function step(id, kvEpoch, { scheduled, computed, blocks = [], tokens = [], isNew = false, done = [] }) {
  const rows = scheduled ? 1 : 0;
  const columns = rows ? [0, scheduled, computed, blocks.length, 0] : [];
  const ints = Int32Array.from([...columns, ...blocks, ...tokens]); // little-endian on every machine
  const added = isNew ? [["request", 0, tokens.length, 0, { temperature: 0 }]] : [];
  return ["execute_model", id, kvEpoch, rows, blocks.length, tokens.length, added, done,
    new Uint8Array(ints.buffer)];
}

async function generate(worker, prompt, count) {
  const limits = await worker.ask("get_limits");
  const [blockSize, kvEpoch, eos] = [limits[7], limits[10], limits[2]];
  let id = limits[11], computed = prompt.length, output = [];
  const blocks = Math.ceil((prompt.length + count + worker.window) / blockSize);
  const table = Array.from({ length: blocks }, (_, index) => index + 1); // block 0 is not ours
  const inFlight = [worker.ask(...step(id++, kvEpoch,
    { scheduled: prompt.length, computed: 0, blocks: table, tokens: prompt, isNew: true }))];
  // The worker keeps the token it has sampled, so the next step need not wait to hear of it.
  while (output.length < count && !eos.includes(output.at(-1))) {
    while (inFlight.length < worker.window) {
      inFlight.push(worker.ask(...step(id++, kvEpoch, { scheduled: 1, computed: computed++ })));
    }
    const [, , , , buffer, , refusals] = await inFlight.shift();
    for (const [, code, message] of refusals) throw Object.assign(Error(message), { code });
    const ints = new Int32Array(Uint8Array.from(buffer).buffer); // num_sampled of each row, then tokens
    output.push(...ints.subarray(1));
  }
  await Promise.all(inFlight); // one step too many was under way; its token is not used
  await worker.ask(...step(id++, kvEpoch, { done: ["request"] }));
  return output.slice(0, count);
}

const isFile = promptText.endsWith(".json");
const prompt = JSON.parse(isFile ? readFileSync(promptText, "utf8") : promptText);
const worker = new Worker(endpoint);
try {
  await worker.hello();
  const way = { uninit: "init_device", device_ready: "load_model", profiled: "allocate_kv_cache",
    kv_allocated: "warm_up", warmed_up: "start_serving", sleeping: "wake_up" };
  let isLoaded = false;
  while (worker.state !== "serving") {
    const next = isLoaded && worker.state === "device_ready" ? "profile_memory" : way[worker.state];
    await worker.ask(next, ...(next === "allocate_kv_cache" ? [BLOCKS] : []));
    isLoaded ||= next === "load_model";
    worker.state = (await worker.ask("get_health"))[2];
  }
  const before = await generate(worker, prompt, Number(maxTokens));
  const asleep = await worker.ask("sleep", 1);
  await worker.ask("wake_up");
  const after = await generate(worker, prompt, Number(maxTokens));
  console.log(JSON.stringify({ before, after, freed_bytes: asleep[1] }));
  await worker.ask("shutdown");
} catch (error) {
  console.error(`${error.code ?? "error"}: ${error.message}`);
  process.exitCode = 1;
} finally {
  worker.socket.close();
}
