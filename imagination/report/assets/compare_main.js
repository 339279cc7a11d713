// Wires list, pair, filters, address and keys together.
function refresh() {
  choose();
  if (!shown.includes(chosen)) chosen = shown[0] || null;
  showCount();
  drawList();
  reveal(Math.max(0, shown.indexOf(chosen)));
  drawPair();
}

function open(pair, remember) {
  chosen = pair;
  history[remember ? "pushState" : "replaceState"](null, "", address(pair));
  reveal(shown.indexOf(pair));
  drawList();
  drawPair();
  view.scrollTop = 0;
  if (remember && matchMedia("(max-width: 900px)").matches) view.scrollIntoView();
}

function step(by) {
  if (!shown.length) return;
  const at = Math.min(shown.length - 1, Math.max(0, shown.indexOf(chosen) + by));
  open(shown[at], false);
}

function follow() {
  const wanted = readAddress();
  choose();
  // a link to a pair that its filters hide: the pair is what was asked for
  if (wanted && !shown.includes(wanted)) {
    form.reset();
    choose();
  }
  chosen = wanted;
  refresh();
}

let timer = 0;
function changed() {
  clearTimeout(timer);
  timer = setTimeout(() => {
    refresh();
    history.replaceState(null, "", address(chosen));
  }, 60);
}

form.addEventListener("input", changed);
form.addEventListener("reset", changed);
form.addEventListener("submit", (event) => event.preventDefault());
addEventListener("hashchange", follow);
addEventListener("popstate", follow);
document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault();
  list.focus();
});

list.addEventListener("keydown", (event) => {
  const page = Math.max(1, Math.floor(list.clientHeight / ROW) - 1);
  const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -shown.length, End: shown.length };
  if (event.key === "Enter") view.focus();
  else if (event.key in moves) step(moves[event.key]);
  else return;
  event.preventDefault();
});

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target.matches("input, select, textarea");
  if (event.key === "Escape") list.focus();
  else if (typing) return;
  else if (event.key === "/") form.elements.q.focus();
  else if (event.key === "j") step(1);
  else if (event.key === "k") step(-1);
  else if (event.key === "d") jump();
  else return;
  event.preventDefault();
});

fillSelects();
if (matchMedia("(min-width: 900px)").matches) document.getElementById("more").open = true;
else document.querySelector("details.summary").open = false;
follow();
