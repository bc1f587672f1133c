// Draws the next token by the rules of model/sampling.py.

const COLDEST = 1e-5; // a lower temperature takes the likeliest token

/** The softmax of logits, in float64. */
function softmax(logits, temperature = 1) {
  const largest = logits.reduce((a, b) => Math.max(a, b), -Infinity);
  const weights = Float64Array.from(logits, (logit) => Math.exp((logit - largest) / temperature));
  const sum = weights.reduce((a, b) => a + b, 0);
  return weights.map((weight) => weight / sum);
}

/** Make tokens that occur in the prompt or answer less likely. Changes the logits. */
function penalise(logits, tokens, penalty) {
  for (const token of new Set(tokens)) logits[token] = logits[token] < 0 ? logits[token] * penalty : logits[token] / penalty;
}

/** The probabilities, with 0 for the tokens that top_k and top_p leave out. Equally likely tokens stay together. */
function likeliest(probabilities, { top_k: most, top_p: share }) {
  const sorted = probabilities.slice().sort().reverse();
  const values = sorted.subarray(0, most > 0 ? most : sorted.length);
  const total = values.reduce((a, b) => a + b, 0);
  let [before, last] = [0, 0];
  for (const value of values) {
    if (share < 1 && before >= share * total) break;
    before += value;
    last = value;
  }
  return probabilities.map((probability) => (probability >= last ? probability : 0));
}

/** The next token. tokens: of the prompt and the answer. random: a number in [0, 1). */
function draw(logits, sampling, tokens, random) {
  if (sampling.repetition_penalty !== 1) penalise(logits, tokens, sampling.repetition_penalty);
  if (sampling.temperature < COLDEST) return logits.indexOf(logits.reduce((a, b) => Math.max(a, b), -Infinity));
  const weights = likeliest(softmax(logits, sampling.temperature), sampling);
  const target = random * weights.reduce((a, b) => a + b, 0);
  let [sum, drawn] = [0, 0];
  for (let token = 0; token < weights.length && sum <= target; token++) {
    if (weights[token] > 0) drawn = token;
    sum += weights[token];
  }
  return drawn;
}
