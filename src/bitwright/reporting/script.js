"use strict";
// Sorts and filters the table of layers. The state is in the address: #sort=-sqnr&filter=conv&runs=integer
const table = document.getElementById("table");
const body = table.tBodies[0];
const rows = [...body.rows];
const heads = [...table.tHead.rows[0].cells];
const keys = heads.map((head) => head.firstElementChild.dataset.key);
const filter = document.getElementById("filter");
const runs = document.getElementById("runs");
const words = new Intl.Collator("en", { numeric: true, sensitivity: "base" });
let state = { key: "order", down: false };

function value(row, column) {
  const cell = row.cells[column];
  if (cell.dataset.v === undefined) return cell.textContent.trim().replace(/^–$/, "");
  return cell.dataset.v === "" ? "" : Number(cell.dataset.v.replace("inf", "Infinity"));
}

function compare(a, b) {
  return typeof a === "number" ? (a === b ? 0 : a - b) : words.compare(a, b);
}

function show() {
  const column = Math.max(keys.indexOf(state.key), 0);
  const sign = state.down ? -1 : 1;
  const order = rows.map((row) => ({ row, v: value(row, column) }));
  // What has no value comes last either way; equal values keep the model's order, as sorting is stable.
  order.sort((a, b) => (a.v === "") - (b.v === "") || sign * compare(a.v, b.v));
  body.append(...order.map((item) => item.row));
  heads.forEach((head, i) => {
    head.setAttribute("aria-sort", i !== column ? "none" : state.down ? "descending" : "ascending");
  });
  const wanted = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
  let visible = 0;
  for (const row of rows) {
    const text = row.textContent.toLowerCase();
    row.hidden = !(wanted.every((word) => text.includes(word)) && (!runs.value || row.dataset.runs === runs.value));
    visible += row.hidden ? 0 : 1;
  }
  const all = rows.length + (rows.length === 1 ? " row" : " rows");
  document.getElementById("shown").textContent = visible === rows.length ? all : visible + " of " + all;
}

function write() {
  const parts = new URLSearchParams();
  if (state.key !== "order" || state.down) parts.set("sort", (state.down ? "-" : "") + state.key);
  if (filter.value) parts.set("filter", filter.value);
  if (runs.value) parts.set("runs", runs.value);
  history.replaceState(null, "", "#" + parts);
  show();
}

function read() {
  const parts = new URLSearchParams(location.hash.slice(1));
  const sort = parts.get("sort") ?? "order";
  state = { key: sort.replace(/^-/, ""), down: sort.startsWith("-") };
  filter.value = parts.get("filter") ?? "";
  runs.value = parts.get("runs") ?? "";
  show();
}

heads.forEach((head, i) => {
  head.firstElementChild.addEventListener("click", () => {
    state = { key: keys[i], down: state.key === keys[i] && !state.down };
    write();
  });
});
filter.addEventListener("input", write);
runs.addEventListener("change", write);
filter.form.addEventListener("submit", (event) => event.preventDefault());
addEventListener("hashchange", read);
read();
