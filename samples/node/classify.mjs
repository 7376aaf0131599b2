// Classifies handwritten digits in Node.js: node classify.mjs resnet.onnx digits.json, which samples/web/prepare.py writes.
import { readFileSync } from "node:fs";
import { InferenceSession, Tensor } from "onnxruntime-node";

const [model, data] = process.argv.slice(2);
const { images, labels, pytorch } = JSON.parse(readFileSync(data));
const session = await InferenceSession.create(model); // its normalizations run by the functions in the file

const x = new Tensor("float32", Float32Array.from(images.flat()), [images.length, 1, 8, 8]); // any batch size
const { [session.outputNames[0]]: logits } = await session.run({ [session.inputNames[0]]: x });

const classes = images.map((_, i) => {
  const row = Array.from(logits.data.slice(10 * i, 10 * i + 10));
  return row.indexOf(Math.max(...row));
});
const share = (others) => ((100 * classes.filter((c, i) => c === others[i]).length) / classes.length).toFixed(2);
console.log(`accuracy ${share(labels)}%, top-1 agreement with PyTorch ${share(pytorch)}%`);
