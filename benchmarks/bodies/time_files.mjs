// Times ONNX files in turns in ONNX Runtime Web's WebAssembly, in Node.js. The protocol is that of time_files.py.
// node time_files.mjs MODULES THREADS SHAPE TURNS FILE …
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const [modules, threads, shape, turns, ...files] = process.argv.slice(2);
const library = join(modules, "onnxruntime-web");
const ort = await import(pathToFileURL(join(library, "dist", "ort.wasm.bundle.min.mjs")));
ort.env.wasm.numThreads = Number(threads);

const dims = shape.split("x").map(Number);
const values = Float32Array.from({ length: dims.reduce((a, b) => a * b) }, (_, i) => 2 * Math.sin(i * 12.9898));
const x = new ort.Tensor("float32", values, dims);
const runs = [];
for (const file of files) {
  const session = await ort.InferenceSession.create(readFileSync(file), { executionProviders: ["wasm"] });
  runs.push([file, () => session.run({ [session.inputNames[0]]: x })]);
}
const seconds = Object.fromEntries(files.map((file) => [file, []]));
const warmUp = 2;
for (let turn = 0; turn < warmUp + Number(turns); turn++) {
  for (const [file, run] of shuffled(runs)) {
    const start = performance.now();
    await run();
    if (turn >= warmUp) seconds[file].push((performance.now() - start) / 1000);
  }
}

function shuffled(list) {
  return list.map((each) => [Math.random(), each]).sort(([a], [b]) => a - b).map(([, each]) => each);
}

const { version } = JSON.parse(readFileSync(join(library, "package.json")));
process.stdout.write(JSON.stringify({ version, seconds }));
