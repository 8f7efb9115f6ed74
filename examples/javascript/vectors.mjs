// Checks the byte examples of the protocol with another msgpack than the worker's: what their
// bytes say is what is written beside them, and headers that are built here have the same bytes.
//
//     node vectors.mjs [../../docs/protocol.vectors.json]
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { decode, encode } from "@msgpack/msgpack";

const path = process.argv[2] ?? new URL("../../docs/protocol.vectors.json", import.meta.url);
const vectors = JSON.parse(readFileSync(path, "utf8"));
const bytes = (hex) => Uint8Array.from(Buffer.from(hex, "hex"));

// A value as the file writes it: binary as {"bin": hexadecimal}.
const plain = (value) =>
  value instanceof Uint8Array ? { bin: Buffer.from(value).toString("hex") }
  : Array.isArray(value) ? value.map(plain)
  : value;

let checked = 0;
for (const group of ["requests", "short", "replies", "failures", "events", "snapshots"]) {
  for (const { name, header, header_hex, body, body_hex } of vectors[group]) {
    const where = `${group}: ${name}`;
    const [header_bytes, body_bytes] = [bytes(header_hex), bytes(body_hex)];
    assert.deepEqual([...header_bytes.subarray(0, 3)], [0x47, 0x57, vectors.version], where);
    assert.deepEqual(decode(header_bytes.subarray(3)), header, where);
    assert.deepEqual(encode(header), header_bytes.slice(3), where);
    const value = decode(body_bytes);
    assert.deepEqual(plain(value), body, where);
    assert.deepEqual(plain(decode(encode(value))), body, where);
    checked++;
  }
}

// The tables of a step: five columns of R rows, then block ids and token ids.
const [, , , rows, blocks, tokens, added, , buffer] =
  decode(bytes(vectors.requests.find(({ name }) => name === "execute_model").body_hex));
const ints = [...new Int32Array(Uint8Array.from(buffer).buffer)];
assert.equal(ints.length, 5 * rows + blocks + tokens);
const [slots, , , newBlocks] = [0, 1, 2, 3, 4].map((i) => ints.slice(i * rows, (i + 1) * rows));
assert.equal(newBlocks.reduce((sum, count) => sum + count, 0), blocks);
for (const [, slot, promptTokens] of added) assert(slots.includes(slot) && promptTokens === tokens);
console.log(`${checked} examples`);
