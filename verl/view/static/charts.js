"use strict";
// Curves of the runs over their steps, one card a chart; Plotly draws them where it is there.

const COLORS = ["#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#9d755d", "#eeca3b"];
const DASHES = ["solid", "dot", "dash", "longdash", "dashdot"];
const PHASE_COLORS = ["#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#ff9da6", "#9d755d",
  "#bab0ac", "#eeca3b", "#83bcb6", "#d6a5c9"];

function smoothed(values, weight) {
  if (!weight) return values;
  let mean = null, sum = 0;
  return values.map(value => {  // an exponential mean without the pull of its first value
    if (value === null) return null;
    mean = (mean ?? 0) * weight + value * (1 - weight);
    sum = sum * weight + (1 - weight);
    return mean / sum;
  });
}

class Charts {
  constructor() {
    this.weight = 0;
    this.hidden = new Set();  // numbers of runs
    this.cards = new Map();
    this.more = new Set();  // names of further metrics
    this.version = "";
    const weight = el("input", { type: "range", min: 0, max: 0.95, step: 0.05, value: 0, ariaLabel: "smoothing" });
    weight.addEventListener("input", () => { this.weight = Number(weight.value); this.draw(); });
    const add = el("input", { type: "search", placeholder: "another metric", id: "metric" });
    add.setAttribute("list", "metric-names");
    add.addEventListener("change", () => {
      if (this.state.names.includes(add.value)) { this.more.add(add.value); add.value = ""; this.version = ""; this.update(this.state); }
    });
    this.names = el("datalist", { id: "metric-names" });
    this.grid = el("div", { className: "grid" });
    this.root = el("section", { id: "curves" },
      el("nav", {}, el("label", {}, "smoothing ", weight), add, this.names), this.grid);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  async update(state) {
    this.state = state;
    const version = JSON.stringify([state.runs.map(run => run.version), state.charts.length, [...this.more]]);
    if (version === this.version) return;
    this.version = version;
    if (this.names.childElementCount !== state.names.length) {
      this.names.replaceChildren(...state.names.map(name => el("option", { value: name })));
    }
    this.charts = [...state.charts, ...[...this.more].map(name => ({ title: name, names: [name], unit: "" }))];
    const wanted = [...new Set(this.charts.flatMap(chart => chart.names))];
    this.curves = wanted.length ? await ask("curves", { name: wanted }) : [];
    this.draw();
  }

  draw() {
    if (!this.curves) return;
    for (const chart of this.charts) {
      if (!chart.stacked) this.drawCard(chart.title, chart, this.lines(chart), {});
      else this.state.runs.forEach((run, i) => {
        const key = `${chart.title}${this.state.runs.length > 1 ? `: ${run.name}` : ""}`;
        if (!this.hidden.has(i)) this.drawCard(key, chart, this.stack(chart, i), { barmode: "stack", bargap: 0 });
        else this.drop(key);
      });
    }
  }

  lines(chart) {
    const lines = [], several = this.state.runs.length > 1, named = new Set();
    // of several runs a colour is a run, a dash a metric
    const names = several ? chart.names.filter(name => !/\/(max|min)$/.test(name)) : chart.names;
    this.state.runs.forEach((run, i) => {
      if (this.hidden.has(i)) return;
      names.forEach((name, k) => {
        const [steps, values] = this.curves[i][name] ?? [[], []];
        if (!steps.length) return;
        const isFirst = !named.has(name);
        named.add(name);
        lines.push({
          x: steps, y: smoothed(values, this.weight), mode: steps.length === 1 ? "markers" : "lines+markers",
          name: visible(name), connectgaps: false, showlegend: isFirst, legendgroup: name,
          hovertemplate: `%{y:.4g} ${(several ? `${visible(run.name)} ` : "") + visible(name)}`.replace(/</g, "\u2039") + "<extra></extra>",
          line: { color: COLORS[(several ? i : k) % COLORS.length], dash: several ? DASHES[k % DASHES.length] : "solid", width: 1.6 },
          marker: { size: steps.length > 60 ? 1 : 4, color: COLORS[(several ? i : k) % COLORS.length] },
        });
      });
    });
    return lines;
  }

  stack(chart, i) {
    return chart.names.flatMap((name, k) => {
      const [steps, values] = this.curves[i][name] ?? [[], []];
      return steps.length ? [{ type: "bar", x: steps, y: values, name: visible(name.replace("timing_s/", "")),
        marker: { color: PHASE_COLORS[k % PHASE_COLORS.length] } }] : [];
    });
  }

  drop(key) {
    this.cards.get(key)?.remove();
    this.cards.delete(key);
  }

  drawCard(key, chart, traces, layout) {
    if (!traces.length) return this.drop(key);
    if (!this.cards.has(key)) {
      this.cards.set(key, el("figure", { data: { chart: key } }, el("figcaption", {}, key), el("div", { className: "plot" })));
      this.grid.append(this.cards.get(key));
    }
    const plot = this.cards.get(key).lastChild;
    if (typeof Plotly === "undefined") return plot.replaceChildren(this.table(traces));
    const style = getComputedStyle(document.body), line = style.getPropertyValue("--line");
    // names of metrics hold no markup of Plotly's: it reads <b> and links in texts
    for (const trace of traces) trace.name = trace.name.replace(/</g, "\u2039");
    Plotly.react(plot, traces, {
      margin: { l: 48, r: 8, t: 6, b: 24 }, height: 240, showlegend: chart.stacked || new Set(traces.map(t => t.name)).size > 1, hovermode: "x unified",
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: style.color, size: 11, family: style.fontFamily },
      xaxis: { gridcolor: line, zerolinecolor: line },
      yaxis: { gridcolor: line, zerolinecolor: line, title: { text: chart.unit || "" } },
      legend: { orientation: "h", y: -0.14, font: { size: 10 } },
      hoverlabel: { bgcolor: style.getPropertyValue("--paper"), font: { color: style.color } }, ...layout,
    }, { displaylogo: false, responsive: true, modeBarButtonsToRemove: ["select2d", "lasso2d"] });
  }

  table(traces) {
    const rows = traces.map(t => el("tr", {}, el("td", {}, t.name), el("td", {}, `step ${t.x.at(-1)}`), el("td", {}, number(t.y.at(-1)))));
    return el("table", {}, rows);
  }
}
