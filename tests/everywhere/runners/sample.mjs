// Opens the page of samples/web: node sample.mjs PAGE DATA PROVIDER SCREENSHOT; prints what the page shows as JSON.
import { join } from "node:path";
import { launch, modules, serve } from "./chromium.mjs";

const [folder, data, provider, screenshot] = process.argv.slice(2);
const server = await serve({ "/": folder, "/data": data, "/node_modules": modules });
const browser = await launch({ webgpu: provider === "webgpu", defaultViewport: { width: 900, height: 1000 } });
try {
  const page = await browser.newPage();
  await page.goto(`${server.url}/index.html?provider=${provider}`);
  await page.waitForSelector("#result[data-state]", { timeout: 120_000 });
  await page.screenshot({ path: screenshot });
  console.log(JSON.stringify(await page.evaluate(() => ({
    result: document.querySelector("#result").textContent,
    captions: [...document.querySelectorAll("figcaption")].map((caption) => Number(caption.textContent)),
    mistaken: document.querySelectorAll("figure.mistaken").length,
  }))));
} finally {
  await browser.close();
  server.close();
}
