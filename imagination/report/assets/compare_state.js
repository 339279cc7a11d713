// What there is and what is chosen of it: the data, the filters, and both in the address.
const data = JSON.parse(document.getElementById("data").textContent);
const texts = data.texts, pictures = data.pictures, pairs = data.pairs, labels = data.labels;
const lower = texts.map((text) => text.toLowerCase());
const form = document.getElementById("filters");

const FIELDS = ["q", "source", "split", "task", "dream", "real", "first", "from", "to", "sort"];
const SELECTS = {
  source: (pair) => pair.source,
  split: (pair) => pair.split,
  task: (pair) => pair.task_id,
  dream: (pair) => pair.dream.outcome,
  real: (pair) => pair.real.outcome,
  first: firstKind,
};
const byId = new Map(pairs.map((pair) => [pair.id, pair]));
let shown = []; // the pairs that pass the filters, in order
let chosen = null; // the pair that is open
let terms = []; // what is searched for, in lower case

for (const pair of pairs) {
  pair.meta = `${pair.id} ${pair.task_id} ${pair.agent}`.toLowerCase();
  pair.texts = new Set([pair.start]);
  for (const turn of pair.turns) {
    pair.texts.add(turn[0]);
    for (const side of [turn[3], turn[4]]) if (side) pair.texts.add(side[0]);
  }
}

function firstKind(pair) {
  if (!pair.comparable) return "left out";
  return pair.first === null ? "never" : pair.turns[pair.first][1];
}

function words(kind) {
  return Object.hasOwn(labels, kind) ? labels[kind] : kind;
}

function fillSelects() {
  for (const [name, of] of Object.entries(SELECTS)) {
    const counts = new Map();
    for (const pair of pairs) counts.set(of(pair), (counts.get(of(pair)) || 0) + 1);
    const select = form.elements[name];
    select.add(new Option("all", ""));
    const values = [...counts.keys()].sort((a, b) => String(a).localeCompare(String(b), "en", { numeric: true }));
    for (const value of values) select.add(new Option(`${words(value)} (${counts.get(value)})`, value));
  }
}

function filters() {
  const found = {};
  for (const name of FIELDS) {
    const value = form.elements[name].value.trim();
    if (value) found[name] = value;
  }
  return found;
}

function parse(query) {
  return [...query.toLowerCase().matchAll(/"([^"]+)"|([^\s"]+)/g)].map((match) => match[1] || match[2]);
}

function finder(query) {
  terms = parse(query);
  const hits = terms.map((term) => lower.map((text) => text.includes(term)));
  return (pair) =>
    terms.every((term, i) => {
      if (pair.meta.includes(term)) return true;
      for (const text of pair.texts) if (hits[i][text]) return true;
      return false;
    });
}

const ORDERS = {
  "": (a, b) => (a.first ?? 1e9) - (b.first ?? 1e9),
  latest: (a, b) => (b.first ?? -1) - (a.first ?? -1),
  false: (a, b) => falseSuccess(b) - falseSuccess(a),
  id: () => 0,
};

function falseSuccess(pair) {
  return Number(pair.dream.outcome === "solved" && pair.real.outcome !== "solved");
}

function choose() {
  const wanted = filters(), matches = finder(wanted.q || "");
  const least = wanted.from ? Number(wanted.from) : 0, most = wanted.to ? Number(wanted.to) : Infinity;
  const selected = Object.keys(SELECTS).filter((name) => wanted[name]);
  shown = pairs.filter(
    (pair) =>
      selected.every((name) => SELECTS[name](pair) === wanted[name]) &&
      pair.turns.length >= least && pair.turns.length <= most && matches(pair),
  );
  const names = new Intl.Collator("en", { numeric: true });
  shown.sort((a, b) => ORDERS[wanted.sort || ""](a, b) || names.compare(a.id, b.id));
}

// The address: #<id>?<filters>, so that a link opens the same pair in the same list.
function address(pair) {
  const id = pair ? encodeURIComponent(pair.id).replaceAll("%2F", "/") : "";
  const query = new URLSearchParams(filters()).toString();
  return "#" + id + (query ? "?" + query : "");
}

function readAddress() {
  const [, id, query] = /^#?([^?]*)\??(.*)$/s.exec(location.hash);
  const values = new URLSearchParams(query);
  for (const name of FIELDS) {
    const element = form.elements[name], value = values.get(name) || "";
    element.value = value;
    if (element.value !== value) element.value = ""; // no such option
  }
  try {
    return byId.get(decodeURIComponent(id)) || null;
  } catch {
    return null; // a stray % in the address
  }
}
