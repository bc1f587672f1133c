// The model: a transformer as in model/model_minimind.py, dense or with experts, one token at a time, with a cache of keys
// and values. The weights stay packed in 8 or 4 bits, and everything is in the memory of the WebAssembly module.

const GROUP = 32; // columns of a matrix are a multiple of this; in 4 bits, so many columns have one scale
const PAGE = 65536; // bytes of a page of WebAssembly memory

const roundUp = (count) => Math.ceil(count / GROUP) * GROUP;

class Model {
  /** spec: config and tensors, from tools/convert/page_file.py. module: the products, from tools/convert/products.py. */
  constructor(spec, module) {
    const { config } = spec;
    this.config = config;
    const { hidden_size: hidden, head_dim: head, num_attention_heads: heads, num_key_value_heads: keyHeads } = config;
    const [width, all] = [config.use_moe ? config.moe_intermediate_size : config.intermediate_size, heads * head];
    const sizes = { hidden, normed: hidden, out: hidden, query: all, mixed: all, key: keyHeads * head, value: keyHeads * head };
    Object.assign(sizes, { gate: width, up: width, logits: config.vocab_size, scores: roundUp(spec.context), queryHead: head });
    // Per layer and key head, a row of keys for each position, and a row for each column of the values. The system only
    // provides memory that has been written to, so a short conversation takes little.
    this.room = roundUp(spec.context);
    const caches = config.num_hidden_layers * keyHeads;
    Object.assign(sizes, { keys: caches * this.room * roundUp(head), values: caches * head * this.room });
    const floats = Object.values(sizes).reduce((sum, size) => sum + roundUp(size), 0);
    const memory = new WebAssembly.Memory({ initial: Math.ceil((spec.bytes + 4 * floats) / PAGE) });
    this.products = new WebAssembly.Instance(module, { env: { memory } }).exports;
    this.memory = memory.buffer;
    let at = spec.bytes;
    for (const [name, size] of Object.entries(sizes)) {
      this[name] = new Float32Array(this.memory, at, size); // followed by zeros up to a multiple of GROUP
      at += 4 * roundUp(size);
    }
    this.tensors = spec.tensors;
    this.tokens = []; // the tokens whose keys and values are cached
  }

  /** The numbers of a tensor that is not packed. */
  numbers(name) {
    const { at, rows, columns } = this.tensors[name];
    return new Float32Array(this.memory, at, rows * columns);
  }

  /** out = the matrix of this name times x. */
  multiply(name, x, out) {
    const { at, scales, rows, columns, bits } = this.tensors[name];
    const product = bits === 4 ? this.products.int4 : this.products.int8;
    product(at, scales, x.byteOffset, out.byteOffset, rows, roundUp(columns));
  }

  /** Copy the embedding of a token into `hidden`. */
  embed(token) {
    const { at, scales, columns, bits } = this.tensors["model.embed_tokens.weight"];
    const wide = roundUp(columns);
    if (bits === 8) {
      const codes = new Int8Array(this.memory, at + token * wide, columns);
      const scale = new Float32Array(this.memory, scales, token + 1)[token];
      for (let i = 0; i < columns; i++) this.hidden[i] = codes[i] * scale;
      return;
    }
    const codes = new Uint8Array(this.memory, at + (token * wide) / 2, wide / 2);
    const scale = new Float32Array(this.memory, scales + (4 * token * wide) / GROUP, wide / GROUP);
    for (let i = 0; i < columns; i++) {
      const [group, place] = [Math.floor(i / GROUP), i % GROUP];
      const byte = codes[(group * GROUP) / 2 + (place % 16)];
      this.hidden[i] = ((place < 16 ? byte & 15 : byte >> 4) - 8) * scale[group];
    }
  }

  /** Write the root mean square norm of x, times a weight, to out, both from `at` on. */
  norm(x, name, out, at = 0) {
    const weight = this.numbers(name);
    let sum = 0;
    for (let i = 0; i < weight.length; i++) sum += x[at + i] ** 2;
    const factor = 1 / Math.sqrt(sum / weight.length + this.config.rms_norm_eps);
    for (let i = 0; i < weight.length; i++) out[at + i] = x[at + i] * factor * weight[i];
  }

  /** Norm each head of x and rotate it by the angles of the position, in place. */
  rotate(x, name) {
    const half = this.cos.length;
    for (let at = 0; at < x.length; at += 2 * half) {
      this.norm(x, name, x, at);
      for (let i = 0; i < half; i++) {
        const [first, second] = [x[at + i], x[at + half + i]];
        x[at + i] = first * this.cos[i] - second * this.sin[i];
        x[at + half + i] = second * this.cos[i] + first * this.sin[i];
      }
    }
  }

  /** Forget all tokens but the first `count`. */
  forget(count) {
    this.tokens.length = Math.min(count, this.tokens.length);
  }

  /** Read the next token. Its keys and values are cached, and `hidden` becomes the output of the last layer. */
  read(token) {
    const position = this.tokens.push(token) - 1;
    const { frequencies, attention_scaling: scaling } = this.config;
    const angles = frequencies.map((frequency) => Math.fround(position * frequency));
    [this.cos, this.sin] = [angles.map((angle) => Math.cos(angle) * scaling), angles.map((angle) => Math.sin(angle) * scaling)];
    this.embed(token);
    for (let layer = 0; layer < this.config.num_hidden_layers; layer++) {
      const name = `model.layers.${layer}`;
      this.norm(this.hidden, `${name}.input_layernorm.weight`, this.normed);
      this.attend(layer, `${name}.self_attn`, position);
      this.norm(this.hidden, `${name}.post_attention_layernorm.weight`, this.normed);
      if (this.config.use_moe) this.mixExperts(`${name}.mlp`);
      else this.feedForward(`${name}.mlp`, 1);
    }
  }

  /** The logits for the token after the last one that was read. */
  head() {
    this.norm(this.hidden, "model.norm.weight", this.normed);
    this.multiply(this.config.tie_word_embeddings ? "model.embed_tokens.weight" : "lm_head.weight", this.normed, this.logits);
    return this.logits;
  }

  /** Add the attention of a layer to `hidden`. */
  attend(layer, name, position) {
    const { head_dim: size, num_attention_heads: heads, num_key_value_heads: keyHeads } = this.config;
    this.multiply(`${name}.q_proj.weight`, this.normed, this.query);
    this.multiply(`${name}.k_proj.weight`, this.normed, this.key);
    this.multiply(`${name}.v_proj.weight`, this.normed, this.value);
    this.rotate(this.query, `${name}.q_norm.weight`);
    this.rotate(this.key, `${name}.k_norm.weight`);
    for (let head = 0; head < keyHeads; head++) this.store(layer * keyHeads + head, head * size, position);
    for (let head = 0; head < heads; head++) {
      const shared = Math.floor((head * keyHeads) / heads);
      this.attendHead(layer * keyHeads + shared, head * size, position + 1);
    }
    this.multiply(`${name}.o_proj.weight`, this.mixed, this.out);
    for (let i = 0; i < this.hidden.length; i++) this.hidden[i] += this.out[i];
  }

  /** Write a head of `key` and `value`, from `from` on, to a cache. */
  store(cache, from, position) {
    const { head_dim: size } = this.config;
    const wide = roundUp(size);
    this.keys.set(this.key.subarray(from, from + size), (cache * this.room + position) * wide);
    for (let i = 0; i < size; i++) this.values[(cache * size + i) * this.room + position] = this.value[from + i];
  }

  /** Attend with the head of `query` from `from` on to the first `count` positions of a cache, and write the result to
   * `mixed`. */
  attendHead(cache, from, count) {
    const { head_dim: size } = this.config;
    const { queryHead, scores, keys, values, mixed, room } = this;
    const [wide, columns] = [roundUp(size), roundUp(count)];
    queryHead.set(this.query.subarray(from, from + size));
    this.products.float32(keys.byteOffset + 4 * cache * room * wide, 0, queryHead.byteOffset, scores.byteOffset, count, wide);
    let [largest, sum] = [-Infinity, 0];
    for (let t = 0; t < count; t++) if (scores[t] > largest) largest = scores[t];
    const scale = 1 / Math.sqrt(size);
    for (let t = 0; t < count; t++) sum += scores[t] = Math.exp((scores[t] - largest) * scale);
    scores.fill(0, count, columns); // for the rest of the last group
    for (let i = 0, at = values.byteOffset + 4 * cache * size * room; i < size; i++, at += 4 * room) {
      this.products.float32(at, 0, scores.byteOffset, mixed.byteOffset + 4 * (from + i), 1, columns);
      mixed[from + i] /= sum;
    }
  }

  /** Add SwiGLU of `normed`, times a weight, to `hidden`. */
  feedForward(name, weight) {
    const { gate, up } = this;
    this.multiply(`${name}.gate_proj.weight`, this.normed, gate);
    this.multiply(`${name}.up_proj.weight`, this.normed, up);
    for (let i = 0; i < gate.length; i++) gate[i] *= up[i] / (1 + Math.exp(-gate[i]));
    this.multiply(`${name}.down_proj.weight`, gate, this.out);
    for (let i = 0; i < this.hidden.length; i++) this.hidden[i] += weight * this.out[i];
  }

  /** Add the outputs of the likeliest experts, weighted by their probabilities, to `hidden`. */
  mixExperts(name) {
    const { num_experts: count, num_experts_per_tok: most, norm_topk_prob: isNormed } = this.config;
    const [router, size] = [this.numbers(`${name}.gate.weight`), this.normed.length];
    const scores = Array.from({ length: count }, (_, expert) => {
      let score = 0;
      for (let i = 0; i < size; i++) score += router[expert * size + i] * this.normed[i];
      return score;
    });
    const weights = softmax(scores);
    const chosen = [...weights.keys()].sort((a, b) => weights[b] - weights[a]).slice(0, most);
    const sum = isNormed ? chosen.reduce((total, expert) => total + weights[expert], 0) : 1;
    for (const expert of chosen) this.feedForward(`${name}.experts.${expert}`, weights[expert] / sum);
  }
}
