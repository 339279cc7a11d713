// The list: only the rows in view exist, so a thousand pairs cost what twenty do.
const list = document.getElementById("pairs"), rows = document.getElementById("rows");
const ROW = 84; // pixels; as in the style sheet
const MARGIN = 6; // rows kept ready above and below

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

function row(pair, position) {
  const kind = firstKind(pair), element = make("div", "row");
  element.id = "row-" + position;
  element.setAttribute("role", "option");
  element.setAttribute("aria-selected", String(pair === chosen));
  element.setAttribute("aria-posinset", String(position + 1));
  element.setAttribute("aria-setsize", String(shown.length));
  element.style.top = position * ROW + "px";
  const where = pair.first === null || !pair.comparable ? words(kind) : `${words(kind)} at turn ${pair.first + 1}`;
  const top = make("div", "line");
  top.append(make("b", "", pair.task_id), make("span", "kind k-" + kind.replace(" ", "-"), where));
  const middle = make("div", "line");
  middle.append(
    make("span", "name", pair.id),
    make("span", "ends", `dream ${pair.dream.outcome} · real ${pair.real.outcome}`),
  );
  const strip = make("div", "strip");
  strip.setAttribute("aria-hidden", "true");
  for (const turn of pair.turns.slice(0, 60)) strip.append(make("i", "k-" + turn[1]));
  element.append(top, middle, strip);
  return element;
}

function drawList() {
  rows.style.height = shown.length * ROW + "px";
  const begin = Math.max(0, Math.floor(list.scrollTop / ROW) - MARGIN);
  const end = Math.min(shown.length, Math.ceil((list.scrollTop + list.clientHeight) / ROW) + MARGIN);
  rows.replaceChildren(...shown.slice(begin, end).map((pair, i) => row(pair, begin + i)));
  const position = shown.indexOf(chosen);
  if (position >= begin && position < end) list.setAttribute("aria-activedescendant", "row-" + position);
  else list.removeAttribute("aria-activedescendant");
}

// By place and not by element: a row may be drawn anew between press and release.
rows.addEventListener("click", (event) => {
  const pair = shown[Math.floor((event.clientY - rows.getBoundingClientRect().top) / ROW)];
  if (pair) open(pair, true);
});

function reveal(position) {
  const top = position * ROW;
  if (top < list.scrollTop) list.scrollTop = top;
  else if (top + ROW > list.scrollTop + list.clientHeight) list.scrollTop = top + ROW - list.clientHeight;
}

function showCount() {
  const all = pairs.length.toLocaleString("en");
  const some = shown.length.toLocaleString("en");
  document.getElementById("count").textContent = shown.length === pairs.length ? `${all} pairs` : `${some} of ${all} pairs`;
}

let waiting = false;
list.addEventListener("scroll", () => {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    drawList();
  });
});
new ResizeObserver(drawList).observe(list);
