// Runs files of the matrix in a version of onnxruntime-node: node node.mjs PACKAGE FOLDER OUT, names of files on stdin. The
// protocol is that of python.py.
import { readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";

const [library, folder, out] = process.argv.slice(2);
const require = createRequire(join(process.env.NNORM_NODE_MODULES, "index.js"));
const ort = require(library);
if (ort.env) ort.env.logLevel = "fatal";

const report = (line) => process.stdout.write(JSON.stringify(line) + "\n");
const TYPES = {
  float32: ["float32", Float32Array],
  float16: ["float16", globalThis.Float16Array ?? Uint16Array],
  int64: ["int64", BigInt64Array],
};

function read({ file, dtype, shape }) {
  const [type, Values] = TYPES[dtype];
  const bytes = readFileSync(join(folder, file));
  return new ort.Tensor(type, new Values(new Uint8Array(bytes).buffer), shape);
}

async function run(entry) {
  const session = await ort.InferenceSession.create(join(folder, entry.file), { logSeverityLevel: 4 });
  const calls = [];
  for (const [number, call] of entry.calls.entries()) {
    const feeds = Object.fromEntries(call.inputs.map((stored, i) => [session.inputNames[i], read(stored)]));
    const results = await session.run(feeds);
    calls.push(session.outputNames.map((name, position) => {
      const { type, data, dims } = results[name];
      const file = `${entry.name.replaceAll("/", ".")}.${number}.${position}.bin`;
      writeFileSync(join(out, file), new Uint8Array(data.buffer, data.byteOffset, data.byteLength));
      return { file, dtype: type, shape: dims };
    }));
  }
  await session.release?.();  // older versions have none
  return calls;
}

const entries = new Map(JSON.parse(readFileSync(join(folder, "index.json"))).map((entry) => [entry.name, entry]));
report({ version: JSON.parse(readFileSync(join(process.env.NNORM_NODE_MODULES, library, "package.json"))).version });
for (const name of readFileSync(0, "utf8").split(/\s+/).filter(Boolean)) {
  report({ begun: name });
  const started = performance.now();
  let result;
  try {
    result = { outputs: await run(entries.get(name)) };
  } catch (error) {
    result = { refused: String(error.message ?? error) };
  }
  report({ finished: name, seconds: (performance.now() - started) / 1000, ...result });
}
