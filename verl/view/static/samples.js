"use strict";
// Samples: a list to choose from, of which only what is seen is in the page, and the one that is open, or its group.

const ROW = 26;  // pixels, as in the style sheet
const ORDERS = { newest: "newest first", best: "best first", worst: "worst first", gained: "changed: gained most",
  lost: "changed: lost most", longest: "longest first", advantage: "highest advantage" };
const SHADES = { none: "no colours", log_probs: "log-prob", advantages: "advantage", mask: "mask", gap: "rollout-trainer gap" };

class SampleStore {
  constructor(run) {
    this.run = run;
    this.clear(0);
  }

  clear(generation) {
    this.generation = generation;
    this.count = 0;
    this.columns = null;
    this.words = {};
    this.changes = null;
  }

  /** Take what is new; returns whether all is there. */
  async read() {
    const answer = await ask("samples", { run: this.run, first: this.count });
    if (answer.generation !== this.generation) { this.clear(answer.generation); if (answer.first) return false; }
    if (this.columns === null) this.columns = Object.fromEntries(Object.keys(answer.columns).map(name => [name, []]));
    this.problems = answer.problems;
    this.words = answer.words;
    const added = answer.columns.step.length;
    for (const [name, values] of Object.entries(answer.columns)) {
      const own = this.columns[name];
      for (const value of values) own.push(value);
    }
    this.count += added;
    if (added) this.changes = null;
    return answer.complete;
  }

  word(name, i) { return this.words[name][this.columns[name][i]]; }

  group(i) {
    const { kind, step, uid, prompt } = this.columns, found = [], named = this.word("uid", i) !== "";
    for (let k = 0; k < this.count; k++) {
      if (kind[k] === kind[i] && step[k] === step[i] && (named ? uid[k] === uid[i] : prompt[k] === prompt[i])) found.push(k);
    }
    return found;
  }

  /** Score less the mean score of the same prompt at the first earlier step; null where there is none. */
  change(i) {
    if (this.changes === null) {
      const { kind, prompt, step, score } = this.columns, first = new Map();
      for (let k = 0; k < this.count; k++) {
        if (score[k] === null) continue;
        const key = prompt[k] * 4 + kind[k], own = first.get(key);
        if (own === undefined || step[k] < own.step) first.set(key, { step: step[k], sum: score[k], count: 1 });
        else if (step[k] === own.step) { own.sum += score[k]; own.count += 1; }
      }
      this.changes = new Array(this.count).fill(null);
      for (let k = 0; k < this.count; k++) {
        const own = first.get(prompt[k] * 4 + kind[k]);
        if (own && score[k] !== null && own.step < step[k]) this.changes[k] = score[k] - own.sum / own.count;
      }
    }
    return this.changes[i];
  }
}

class SampleBrowser {
  constructor() {
    this.filters = { run: 0, kind: "", step: "", source: "", status: "", order: "newest", text: "", tokens: false };
    this.shade = "none";
    this.shown = [];
    this.bar = el("nav", { id: "filters" });
    this.note = el("p", { className: "note", id: "count" });
    this.space = el("div", { className: "space" });
    this.list = el("div", { id: "list", tabIndex: 0 }, this.space);
    this.open = el("article", { id: "sample" }, el("p", { className: "note" }, "Choose a sample."));
    this.root = el("section", { id: "samples" }, this.bar, this.note, el("div", { className: "halves" }, this.list, this.open));
    this.list.addEventListener("scroll", () => this.drawList());
    this.list.addEventListener("keydown", event => {
      const by = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1 }[event.key];
      if (!by) return;
      event.preventDefault();
      const place = Math.min(this.shown.length - 1, Math.max(0, this.shown.indexOf(this.current) + by));
      this.list.scrollTop = Math.max(0, place * ROW - this.list.clientHeight / 2);
      this.show(this.shown[place]);
    });
  }

  get store() { return this.stores[this.filters.run]; }

  async start(names) {
    this.names = names;
    this.stores = names.map((_, i) => new SampleStore(i));
    await this.read();
    const [kind, ...rest] = location.hash.slice(1).split("/");
    if (kind === "samples" && rest.length === 2) { this.filters.run = Number(rest[0]) || 0; await this.read(); await this.show(Number(rest[1])); }
    else if (this.shown.length) await this.show(this.shown[0]);
  }

  async read() {
    clearTimeout(this.timer);
    const store = this.store, before = store.count, generation = store.generation;
    let complete = false;
    try {
      complete = await store.read();
    } catch (error) {
      this.note.textContent = visible(error.message);
    }
    if (store.count !== before || store.generation !== generation || !this.bar.childElementCount) { this.drawBar(); await this.filter(); }
    this.isComplete = complete;
    this.drawCount();
    if (embedded === null) this.timer = setTimeout(() => this.read(), complete ? 3000 : 20);
  }

  drawBar() {
    if (this.bar.contains(document.activeElement)) return;  // someone is choosing
    const { words } = this.store, f = this.filters;
    const set = name => value => { f[name] = name === "run" ? Number(value) : value; name === "run" ? this.changeRun() : this.filter(); };
    const all = (name, label) => choice(label, [["", `all ${label}`], ...(words[name] ?? []).filter(Boolean).sort().map(w => [w, visible(w)])], f[name], set(name));
    const step = el("input", { type: "search", placeholder: "step: 20, 5-9, last", value: f.step, id: "step", size: 14 });
    step.addEventListener("input", settled(() => set("step")(step.value.trim())));
    const text = el("input", { type: "search", placeholder: "text", value: f.text, id: "text" });
    text.addEventListener("input", settled(() => set("text")(text.value), 300));
    const tokens = el("input", { type: "checkbox", checked: f.tokens, id: "with-tokens" });
    tokens.addEventListener("change", () => set("tokens")(tokens.checked));
    const parts = [all("kind", "kinds"), step, all("source", "sources"), all("status", "statuses"),
      choice("order", Object.entries(ORDERS), f.order, set("order")), text, el("label", {}, tokens, " with tokens")];
    if (this.names.length > 1) parts.unshift(choice("run", this.names.map((name, i) => [String(i), visible(name)]), String(f.run), set("run")));
    this.bar.replaceChildren(...parts);
    this.bar.querySelectorAll("select").forEach(select => { select.id = `by-${select.ariaLabel}`; });
  }

  changeRun() {
    Object.assign(this.filters, { kind: "", source: "", status: "" });
    this.shown = [];
    document.activeElement.blur();
    this.bar.replaceChildren();
    this.read();
  }

  async filter() {
    const store = this.store, f = this.filters, c = store.columns;
    const number = name => f[name] === "" ? -1 : store.words[name].indexOf(f[name]);
    const kind = number("kind"), source = number("source"), status = number("status");
    const [low, high] = this.steps();
    const found = f.text ? new Set(await ask("search", { run: f.run, text: f.text })) : null;
    if (store !== this.store) return;
    const shown = [];
    for (let i = 0; i < store.count; i++) {
      if ((f.kind === "" || c.kind[i] === kind) && (f.source === "" || c.source[i] === source) && (f.status === "" || c.status[i] === status)
        && c.step[i] >= low && c.step[i] <= high && (!f.tokens || c.has_tokens[i]) && (found === null || found.has(i))) shown.push(i);
    }
    const least = value => value === null ? -Infinity : value, most = value => value === null ? Infinity : value;
    const keys = { best: i => -least(c.score[i]), worst: i => most(c.score[i]), longest: i => -c.tokens[i],
      advantage: i => -least(c.advantage[i]), gained: i => -least(store.change(i)), lost: i => most(store.change(i)) };
    let kept = f.order === "gained" || f.order === "lost" ? shown.filter(i => store.change(i)) : shown;
    if (f.order === "newest") kept.sort((a, b) => c.step[b] - c.step[a] || c.kind[a] - c.kind[b] || c.line[a] - c.line[b]);
    else { const key = new Map(kept.map(i => [i, keys[f.order](i)])); kept.sort((a, b) => key.get(a) - key.get(b) || c.step[b] - c.step[a] || a - b); }
    this.shown = kept;
    this.drawCount();
    this.list.scrollTop = 0;
    this.drawList();
  }

  steps() {
    const text = this.filters.step;
    if (text === "") return [-Infinity, Infinity];
    if (text === "last") {
      const last = this.store.columns.step.reduce((a, b) => Math.max(a, b), 0);
      return [last, last];
    }
    const [low, high] = text.split("-").map(Number);
    return [low, high ?? low];
  }

  drawCount() {
    const store = this.store;
    const parts = [`${this.shown.length.toLocaleString("en")} of ${store.count.toLocaleString("en")} samples`];
    if (!this.isComplete) parts.push("reading ...");
    if (store.problems?.length) parts.push(`skipped: ${store.problems.slice(0, 3).join("; ")}`);
    this.note.textContent = visible(parts.join(", "));
  }

  drawList() {
    if (!this.stores || this.root.hidden || !this.store.columns) return;
    const store = this.store, c = store.columns;
    this.space.style.height = `${this.shown.length * ROW}px`;
    const first = Math.max(0, Math.floor(this.list.scrollTop / ROW) - 5), last = Math.min(this.shown.length, first + Math.ceil(this.list.clientHeight / ROW) + 10);
    const rows = [];
    for (let place = first; place < last; place++) {
      const i = this.shown[place], score = c.score[i], change = store.changes === null ? null : store.changes[i];
      const row = el("div", { className: `row${i === this.current ? " chosen" : ""}`, style: { top: `${place * ROW}px` }, data: { number: i } },
        el("span", { className: "note" }, `${store.word("kind", i)[0]}${c.step[i]}`), el("b", { className: score > 0 ? "good" : "" }, number(score)),
        el("span", { className: change > 0 ? "good" : "bad" }, change === null ? "" : `${change > 0 ? "+" : ""}${number(change, 2)}`),
        el("span", {}, store.word("source", i)), el("span", { className: store.word("status", i) === "error" ? "bad" : "note" }, store.word("status", i)),
        el("span", { className: "note" }, `${c.tokens[i]} tok${c.turns[i] > 1 ? `, ${c.turns[i]} turns` : ""}${c.has_tokens[i] ? " \u25a4" : ""}`));
      row.addEventListener("click", () => this.show(i));
      rows.push(row);
    }
    this.space.replaceChildren(...rows);
  }

  async show(i) {
    this.current = i;
    this.drawList();
    const whole = await this.fetch(i);
    if (i !== this.current || whole === null) return;
    const group = this.store.group(i), parts = [this.head(i, whole)];
    const tools = el("nav", {}, choice("colours", Object.entries(SHADES), this.shade, value => { this.shade = value; this.draw(); }), el("span", { className: "legend" }));
    tools.firstChild.id = "shade";
    if (group.length > 1) {
      const side = el("button", { type: "button", id: "group" }, `group of ${group.length} side by side`);
      side.addEventListener("click", () => this.showGroup(i, group));
      tools.append(side);
    }
    const others = this.elsewhere(i);
    if (others.length > 1) tools.append(el("span", { className: "note" }, "this prompt at step"), ...others.map(k => {
      const chip = el("button", { type: "button", className: k === i ? "chosen" : "" }, `${this.store.columns.step[k]}: ${number(this.store.columns.score[k], 2)}`);
      chip.addEventListener("click", () => this.show(k));
      return chip;
    }));
    this.bodies = [[whole, el("div", { className: "turns" })]];
    this.open.replaceChildren(...parts, tools, this.metadata(whole), this.block("prompt", whole.prompt, false, []), this.bodies[0][1]);
    this.draw();
  }

  async fetch(i) {
    try {
      return await ask("sample", { run: this.filters.run, number: i });
    } catch (error) {
      this.open.replaceChildren(el("p", { className: "bad" }, error.message));
      return null;
    }
  }

  /** One sample a step of the same prompt: the first one there. */
  elsewhere(i) {
    const { kind, prompt, step } = this.store.columns, byStep = new Map();
    for (let k = 0; k < this.store.count; k++) if (kind[k] === kind[i] && prompt[k] === prompt[i] && (!byStep.has(step[k]) || k === i)) byStep.set(step[k], k);
    return [...byStep.keys()].sort((a, b) => a - b).slice(-40).map(key => byStep.get(key));
  }

  async showGroup(i, group) {
    const scores = this.store.columns.score;
    const numbers = [...group].sort((a, b) => (scores[b] ?? -Infinity) - (scores[a] ?? -Infinity)).slice(0, 64);
    const whole = await Promise.all(numbers.map(k => this.fetch(k)));
    const back = el("button", { type: "button" }, "one sample");
    back.addEventListener("click", () => this.show(i));
    const shade = choice("colours", Object.entries(SHADES), this.shade, value => { this.shade = value; this.draw(); });
    shade.id = "shade";
    this.bodies = whole.filter(Boolean).map(one => [one, el("div", { className: "turns" })]);
    this.open.replaceChildren(el("nav", {}, shade, el("span", { className: "legend" }), back), this.block("prompt", whole[0]?.prompt, false, []),
      this.ground(whole[0]), el("div", { className: "group" }, this.bodies.map(([one, body]) => el("div", { className: "member" }, this.head(null, one), body))));
    this.draw();
  }

  head(i, whole) {
    const advantage = whole.metadata.advantage, parts = [`step ${whole.step}`, `#${whole.index}`, whole.uid ?? "", whole.metadata.status ?? whole.metadata.finish_reason ?? ""];
    return el("h3", {}, el("b", { className: whole.reward > 0 ? "good" : "" }, `score ${number(whole.reward)} `),
      typeof advantage === "number" ? `advantage ${number(advantage, 2)} ` : null, el("small", { className: "note" }, parts.filter(Boolean).join("  ")));
  }

  ground(whole) {
    const truth = whole?.metadata.gts;
    return truth === undefined || truth === "" || truth === null ? null : this.block("ground truth", shown(truth), false, []);
  }

  metadata(whole) {
    const rows = Object.entries({ ...whole.metadata, file: `${whole.file}:${whole.line}` }).filter(([name]) => name !== "gts");
    const table = el("table", { className: "metadata" }, rows.map(([name, value]) => el("tr", {}, el("td", { className: "note" }, name), el("td", {}, shown(value)))));
    return el("div", {}, this.ground(whole), el("details", {}, el("summary", { className: "note" }, "all values"), table));
  }

  block(title, text, generated, notes, body = null) {
    const shownText = text === null || text === undefined ? "(token ids only)" : text;
    return el("div", { className: `turn ${generated ? "generated" : "read"}` }, el("div", { className: "note" }, [title, ...notes].filter(Boolean).join("  ")),
      el("pre", {}, body ?? shownText));
  }

  draw() {
    for (const [whole, body] of this.bodies ?? []) {
      const scale = this.scale(whole);
      let turn = 0;
      const turns = whole.turns.filter(t => t.generated || t.text === null || t.text.trim()).map(t => {
        turn += t.generated;
        const notes = [t.reward === null ? "" : `reward ${number(t.reward)}`, t.seconds === null ? "" : `${number(t.seconds, 2)} s`,
          t.log_prob === null ? "" : `log-prob ${number(t.log_prob)}`, t.span === null ? "" : `${t.span[1] - t.span[0]} tokens`];
        return this.block(t.generated ? `turn ${turn}, ${t.role}` : t.role, t.text, t.generated, notes, this.tokens(whole, t, scale));
      });
      const calls = whole.tool_calls.map(call => el("div", { className: "note call" },
        `tool call ${call.name}: ${call.outcome ?? ""}${typeof call.seconds === "number" ? `, ${number(call.seconds, 2)} s` : ""}`));
      const missing = this.shade !== "none" && !scale ? [el("p", { className: "note" }, whole.tokens.length
        ? `This sample's tokens have no ${SHADES[this.shade]}.` : "The tokens of this sample were not kept: trainer.rollout_data_tokens.")] : [];
      body.replaceChildren(...missing, ...turns, ...calls);
    }
    const legend = this.open.querySelector(".legend");
    const texts = { log_probs: "none at 0, red at -4 and less", advantages: "green positive, red negative", mask: "green in the loss, grey masked",
      gap: "log-prob of the rollout less the trainer's: orange higher, blue lower" };
    if (legend) legend.textContent = texts[this.shade] ?? "";
  }

  /** What colours are relative to; null where the sample has not got the values. */
  scale(whole) {
    const rows = whole.tokens.filter(row => this.shade === "gap" ? row.log_probs && row.rollout_log_probs : row[this.shade]);
    if (this.shade === "none" || !rows.length) return null;
    const values = rows.flatMap(row => this.shade === "gap" ? row.log_probs.map((v, k) => row.rollout_log_probs[k] - v) : row[this.shade]);
    return values.reduce((most, v) => Math.max(most, Math.abs(v ?? 0)), 1e-9);
  }

  tokens(whole, turn, scale) {
    const row = whole.tokens[turn.row ?? 0];
    if (!row || (scale === null && turn.text !== null)) return null;
    const texts = row.text ?? row.ids.map(id => `[${id}]`), [first, last] = turn.span ?? [0, texts.length], made = [];
    for (let k = first; k < Math.min(last, texts.length); k++) {
      const values = Object.entries(row).filter(([name]) => name !== "text").map(([name, v]) => `${name} ${typeof v[k] === "number" && !Number.isInteger(v[k]) ? number(v[k], 4) : v[k]}`);
      const piece = el("span", { className: "token", title: visible(values.join("\n")) }, texts[k]);
      const color = scale === null ? "" : this.color(row, k, scale);
      if (color) piece.style.backgroundColor = color;
      made.push(piece);
    }
    return made;
  }

  color(row, k, scale) {
    const tint = (hue, share) => `hsla(${hue}, 75%, 50%, ${Math.min(0.75, 0.75 * share).toFixed(3)})`;
    if (row.mask && !row.mask[k]) return "hsla(0, 0%, 50%, 0.25)";
    if (this.shade === "mask") return tint(140, 0.6);
    if (this.shade === "log_probs") return tint(0, Math.min(1, -(row.log_probs[k] ?? 0) / 4));
    if (this.shade === "advantages") return tint(row.advantages[k] >= 0 ? 140 : 0, Math.abs(row.advantages[k]) / scale);
    const gap = (row.rollout_log_probs[k] ?? 0) - (row.log_probs[k] ?? 0);
    return tint(gap >= 0 ? 30 : 220, Math.abs(gap) / scale);
  }
}
