// A headless Chromium, driven by puppeteer-core, and a server of folders on this machine. NNORM_NODE_MODULES is the folder of
// the installed packages, NNORM_CHROMIUM the browser.
import { createServer } from "node:http";
import { readFile } from "node:fs/promises";
import { createRequire } from "node:module";
import { extname, join, normalize } from "node:path";
import { pathToFileURL } from "node:url";

export const modules = process.env.NNORM_NODE_MODULES;
const require = createRequire(join(modules, "index.js"));
const { default: puppeteer } = await import(pathToFileURL(require.resolve("puppeteer-core")));

const TYPES = { ".html": "text/html", ".js": "text/javascript", ".mjs": "text/javascript", ".wasm": "application/wasm" };

/** Serves `folders`, from the path of a URL to a folder, on a free port of the loopback interface. */
export async function serve(folders) {
  const server = createServer(async (request, response) => {
    const path = normalize(decodeURIComponent(new URL(request.url, "http://localhost").pathname));
    const prefix = Object.keys(folders).filter((key) => path.startsWith(key)).sort((a, b) => b.length - a.length)[0];
    try {
      const body = await readFile(join(folders[prefix], path.slice(prefix.length)));
      response.writeHead(200, { "Content-Type": TYPES[extname(path)] ?? "application/octet-stream" }).end(body);
    } catch {
      response.writeHead(404).end();
    }
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  return { url: `http://127.0.0.1:${server.address().port}`, close: () => server.close() };
}

/** WebGPU without a GPU is SwiftShader's, which comes with Chromium. */
export function launch({ webgpu = false, ...options } = {}) {
  const gpu = ["--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--enable-features=Vulkan", "--use-vulkan=swiftshader"];
  return puppeteer.launch({
    executablePath: process.env.NNORM_CHROMIUM,
    headless: true,
    args: ["--no-sandbox", ...(webgpu ? gpu : [])],
    protocolTimeout: 300_000,
    ...options,
  });
}
