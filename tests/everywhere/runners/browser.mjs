// Runs files of the matrix in a version of onnxruntime-web in headless Chromium: node browser.mjs PROVIDER PACKAGE FOLDER OUT,
// where PROVIDER is wasm or webgpu; names of files on stdin. The protocol is that of python.py.
import { existsSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { launch, modules, serve } from "./chromium.mjs";

const [provider, library, folder, out] = process.argv.slice(2);
const report = (line) => process.stdout.write(JSON.stringify(line) + "\n");

const server = await serve({ "/files": folder, "/ort": join(modules, library, "dist"), "/": import.meta.dirname });
// Versions up to 1.18 are not modules. They are scripts that set `ort`.
const bundle = `ort.${provider}.bundle.min.mjs`;
const entry = existsSync(join(modules, library, "dist", bundle)) ? bundle : "ort.min.js";
const browser = await launch({ webgpu: provider === "webgpu" });
const page = await browser.newPage();
page.on("error", (error) => { process.stderr.write(`${error}\n`); process.exit(3); });
await page.goto(`${server.url}/browser.html?provider=${provider}&entry=${entry}`);
await page.waitForFunction("window.ready !== undefined");
if (!(await page.evaluate("window.ready"))) throw new Error("Chromium offers no WebGPU adapter");

const entries = new Map(JSON.parse(readFileSync(join(folder, "index.json"))).map((entry) => [entry.name, entry]));
const { version } = JSON.parse(readFileSync(join(modules, library, "package.json")));
report({ version });
for (const name of readFileSync(0, "utf8").split(/\s+/).filter(Boolean)) {
  report({ begun: name });
  const started = performance.now();
  let result;
  try {
    const calls = await page.evaluate((entry) => window.run(entry), entries.get(name));
    const outputs = calls.map((call, number) => call.map(({ dtype, shape, base64 }, position) => {
      const file = `${name.replaceAll("/", ".")}.${number}.${position}.bin`;
      writeFileSync(join(out, file), Buffer.from(base64, "base64"));
      return { file, dtype, shape };
    }));
    result = { outputs };
  } catch (error) {
    result = { refused: String(error.message ?? error) };
  }
  report({ finished: name, seconds: (performance.now() - started) / 1000, ...result });
}
await browser.close();
server.close();
