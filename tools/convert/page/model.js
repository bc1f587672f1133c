// The model: a transformer as in model/model_minimind.py, dense or with experts, one token at a time, with a cache of keys
// and values. The weights stay packed in 8 or 4 bits, in the memory of the WebAssembly module.

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
    Object.assign(sizes, { gate: width, up: width, logits: config.vocab_size });
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
    this.layers = Array.from({ length: config.num_hidden_layers }, () => ({ keys: new Float32Array(0), values: new Float32Array(0) }));
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
    for (let layer = 0; layer < this.layers.length; layer++) {
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
    const { head_dim: size, num_attention_heads: heads } = this.config;
    const [query, mixed, width] = [this.query, this.mixed, this.key.length];
    const perKey = (heads * size) / width; // query heads per key head
    this.multiply(`${name}.q_proj.weight`, this.normed, query);
    this.multiply(`${name}.k_proj.weight`, this.normed, this.key);
    this.multiply(`${name}.v_proj.weight`, this.normed, this.value);
    this.rotate(query, `${name}.q_norm.weight`);
    this.rotate(this.key, `${name}.k_norm.weight`);
    const { keys, values } = this.store(layer, position);
    const scores = new Float32Array(position + 1);
    mixed.fill(0);
    for (let head = 0; head < heads; head++) {
      const [own, shared] = [head * size, Math.floor(head / perKey) * size];
      let [largest, sum] = [-Infinity, 0];
      for (let t = 0, at = shared; t <= position; t++, at += width) {
        let score = 0;
        for (let i = 0; i < size; i++) score += query[own + i] * keys[at + i];
        scores[t] = score / Math.sqrt(size);
        if (scores[t] > largest) largest = scores[t];
      }
      for (let t = 0; t <= position; t++) sum += scores[t] = Math.exp(scores[t] - largest);
      for (let t = 0, at = shared; t <= position; t++, at += width) {
        const weight = scores[t] / sum;
        for (let i = 0; i < size; i++) mixed[own + i] += weight * values[at + i];
      }
    }
    this.multiply(`${name}.o_proj.weight`, mixed, this.out);
    for (let i = 0; i < this.hidden.length; i++) this.hidden[i] += this.out[i];
  }

  /** Append `key` and `value` to a layer's cache, which doubles when it is full. */
  store(layer, position) {
    const [cache, width] = [this.layers[layer], this.key.length];
    for (const [kind, vector] of [["keys", this.key], ["values", this.value]]) {
      if (cache[kind].length < (position + 1) * width) {
        const larger = new Float32Array(2 * Math.max(position, GROUP) * width);
        larger.set(cache[kind]);
        cache[kind] = larger;
      }
      cache[kind].set(vector, position * width);
    }
    return cache;
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
