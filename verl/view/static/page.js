"use strict";
// The page: its parts, one at a time, and the state of the runs above them, asked for again while runs are under way.

class Page {
  constructor() {
    this.charts = new Charts();
    this.browser = new SampleBrowser();
    this.details = el("section", { id: "details" });
    this.runs = el("div", { id: "runs" });
    this.notes = el("div", { id: "notes" });
    this.parts = { curves: this.charts.root, samples: this.browser.root, details: this.details };
    const names = { curves: "Curves", samples: "Samples", details: "Options and warnings" };
    this.tabs = Object.keys(names).map(name => el("a", { href: `#${name}`, data: { part: name } }, names[name]));
    const theme = el("button", { type: "button", id: "theme", title: "dark or light" }, "\u25d0");
    theme.addEventListener("click", () => {
      const isDark = document.documentElement.dataset.theme
        ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
      document.documentElement.dataset.theme = isDark ? "light" : "dark";
      this.charts.draw();
    });
    this.title = el("h1");
    document.getElementById("page").append(
      el("header", {}, this.title, el("nav", { id: "tabs" }, this.tabs), theme), this.notes, this.runs, ...Object.values(this.parts));
    addEventListener("hashchange", () => this.show());
  }

  async start() {
    await this.refresh();
    this.show();
    await this.browser.start(this.state.runs.length ? this.state.runs.map(run => run.name) : [this.state.title]);
  }

  show() {
    const onlySamples = this.state.runs.length === 0;
    const asked = location.hash.slice(1).split("/")[0];
    const name = onlySamples ? "samples" : asked in this.parts ? asked : "curves";
    for (const [other, part] of Object.entries(this.parts)) part.hidden = other !== name;
    for (const tab of this.tabs) {
      tab.classList.toggle("chosen", tab.dataset.part === name);
      tab.hidden = onlySamples;
    }
    if (name === "curves") { this.charts.draw(); dispatchEvent(new Event("resize")); }
    if (name === "samples") this.browser.drawList();
    if (name === "details") this.drawDetails();
  }

  async refresh() {
    let wait_s = 2;
    try {
      this.state = await ask("state");
      this.title.textContent = visible(this.state.title);
      document.title = visible(this.state.runs.length === 1 ? this.state.runs[0].name : this.state.title);
      this.notes.replaceChildren(...(this.state.notes ?? []).map(note => el("p", { className: "note" }, note)));
      this.drawRuns();
      await this.charts.update(this.state);
      if (!this.state.runs.some(run => run.state.startsWith("running"))) wait_s = 15;
    } catch (error) {
      this.notes.replaceChildren(el("p", { className: "bad" }, `The server does not answer: ${error.message}`));
    }
    if (embedded === null) setTimeout(() => this.refresh(), 1000 * wait_s);
  }

  drawRuns() {
    this.runs.replaceChildren(...this.state.runs.map((run, i) => {
      const steps = run.last_step === null ? "no step yet" : `step ${run.last_step}${run.total_steps ? ` of ${run.total_steps}` : ""}`;
      const box = el("input", { type: "checkbox", checked: !this.charts.hidden.has(i), ariaLabel: `show ${run.name}` });
      box.addEventListener("change", () => {
        if (box.checked) this.charts.hidden.delete(i); else this.charts.hidden.add(i);
        this.charts.draw();
      });
      const kind = run.state.split(/[: ]/)[0];
      return el("div", { className: "run", title: run.folder }, box,
        el("i", { className: "swatch", style: { background: COLORS[i % COLORS.length] } }), el("b", {}, run.name),
        el("span", { className: `state ${kind}` }, run.state.slice(0, 160) || "unknown"), el("span", {}, steps),
        run.warnings.length ? el("a", { href: "#details", className: "bad" }, `${run.warnings.length} warning${run.warnings.length > 1 ? "s" : ""}`) : null,
        run.unread ? el("span", { className: "bad" }, `${run.unread} unreadable lines of metrics`) : null);
    }));
  }

  async drawDetails() {
    const config = await ask("config"), runs = this.state.runs, parts = [];
    for (const run of runs) {
      const about = Object.entries(run.about).filter(([, value]) => value);
      parts.push(el("h2", {}, run.name), el("p", { className: "note" }, run.folder),
        el("table", {}, about.map(([name, value]) => el("tr", {}, el("td", { className: "note" }, name), el("td", {}, value)))));
      parts.push(el("h3", {}, run.warnings.length ? "Warnings" : "No warnings"), el("ul", { className: "warnings" }, run.warnings.map(w =>
        el("li", {}, w.step === null ? "" : el("b", {}, `step ${w.step} `), w.text, w.count > 1 ? el("span", { className: "note" }, ` (${w.count} times)`) : null))));
      if (run.command) parts.push(el("details", {}, el("summary", {}, "Command"), el("pre", {}, run.command)));
      if (run.files.length) parts.push(el("details", {}, el("summary", {}, `Traces and profiles: ${run.files.length}`),
        el("p", { className: "note" }, "Open .json and .json.gz in ui.perfetto.dev or chrome://tracing, .pickle in pytorch.org/memory_viz, .nsys-rep in Nsight Systems."),
        el("ul", { className: "files" }, run.files.map(name => el("li", {}, embedded !== null ? name
          : el("a", { href: `api/file?${new URLSearchParams({ run: runs.indexOf(run), name })}`, download: name.split("/").pop() }, name))))));
    }
    if (runs.length > 1) {
      parts.push(el("h2", {}, `Options that differ: ${config.differences.length}`), el("table", { id: "differences" },
        el("tr", {}, el("th", {}, "option"), runs.map(run => el("th", {}, run.name))),
        config.differences.map(([key, values]) => el("tr", {}, el("td", {}, key), values.map(value => el("td", {}, shown(value)))))));
    }
    const words = el("input", { type: "search", placeholder: "an option", id: "option" }), table = el("table");
    const draw = () => {
      const keys = [...new Set(config.options.flatMap(own => Object.keys(own)))].filter(key => key.includes(words.value));
      table.replaceChildren(...keys.slice(0, 400).map(key =>
        el("tr", {}, el("td", {}, key), config.options.map(own => el("td", {}, shown(own[key]))))));
    };
    words.addEventListener("input", settled(draw));
    draw();
    this.details.replaceChildren(...parts, el("h2", {}, "Options"), words, table);
  }
}

function shown(value) {
  return value === undefined ? "" : typeof value === "string" ? value : JSON.stringify(value);
}

async function loadCharts() {
  const packed = document.getElementById("plotly");
  if (!packed || typeof Plotly !== "undefined") return;
  const bytes = Uint8Array.from(atob(JSON.parse(packed.textContent)), c => c.charCodeAt(0));
  const code = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  document.head.append(el("script", { textContent: code }));  // the page's policy names its hash
}

loadCharts().then(() => { window.page = new Page(); return window.page.start(); });
