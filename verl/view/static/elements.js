"use strict";
// Elements, numbers, and where data come from. Text of a run is only ever set as text: nothing here reads markup.

const embedded = document.getElementById("data") ? JSON.parse(document.getElementById("data").textContent) : null;

const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]/gu;

/** Text with control characters, and those that turn the direction of writing, escaped. */
function visible(text) {
  return String(text).replace(UNSEEN, c => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0"));
}

/** An element; `options` are its properties, `data` and `style` objects; children are elements or texts. */
function el(tag, options = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (name === "data") Object.assign(made.dataset, value);
    else if (name === "style") Object.assign(made.style, value);
    else made[name] = value;
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined) made.append(child instanceof Node ? child : visible(child));
  }
  return made;
}

function number(value, digits = 3) {
  if (value === null || value === undefined) return "-";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  return size !== 0 && (size < 10 ** -digits || size >= 1e6) ? value.toExponential(2) : value.toFixed(digits);
}

function choice(label, options, chosen, change) {
  const select = el("select", { ariaLabel: label, title: label },
    options.map(([value, text]) => el("option", { value, selected: value === chosen }, text)));
  select.addEventListener("change", () => change(select.value));
  return select;
}

/** What the server answers; in a page that is a file, what it has inside. */
async function ask(route, query = {}) {
  if (embedded !== null) return fromFile(route, query);
  const words = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) for (const one of [value].flat()) words.append(name, one);
  const answer = await fetch(`/api/${route}?${words}`);
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

function fromFile(route, query) {
  if (route === "sample") return embedded.samples[query.run].whole[query.number];
  if (route === "samples") return { ...embedded.samples[query.run], complete: true };
  if (route === "search") {
    const wanted = query.text.toLowerCase(), whole = embedded.samples[query.run].whole;
    return whole.flatMap((sample, i) => JSON.stringify(sample).toLowerCase().includes(wanted) ? [i] : []);
  }
  if (route === "curves") {
    const names = new Set([query.name].flat());
    return embedded.curves.map(own => Object.fromEntries(Object.entries(own).filter(([name]) => names.has(name))));
  }
  return embedded[route];
}

/** Wait until `call` has not been made for some milliseconds, then make it once. */
function settled(call, wait_ms = 150) {
  let timer;
  return (...words) => { clearTimeout(timer); timer = setTimeout(() => call(...words), wait_ms); };
}
