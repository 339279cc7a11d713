// One episode at a time: a slider through its turns. All text of worlds and models becomes text nodes, and nothing else.
const data = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
const which = at("which"), slider = at("turn");
let shown = data.episodes, chosen = null, number = 0;

function make(tag, name, text) {
  const element = document.createElement(tag);
  if (name) element.className = name;
  if (text) element.textContent = text;
  return element;
}

function image(place, what) {
  const element = make("img");
  if (place) element.src = data.pictures[place - 1];
  element.alt = what;
  return element;
}

// A turn is shown beside the screen before it: the real one, in which the action was taken.
function before(turn) {
  return turn ? chosen.turns[turn - 1].real : chosen.start;
}

function outline(place) {
  const box = make("div", "place");
  const [x, y, width, height] = place;
  for (const [side, value] of Object.entries({ left: x, top: y, width, height })) box.style[side] = 100 * value + "%";
  return box;
}

function drawTurn() {
  const turn = chosen.turns[number];
  slider.value = number;
  at("previous").disabled = number === 0;
  at("next").disabled = number === chosen.turns.length - 1;
  at("number").textContent = `Turn ${number + 1} of ${chosen.turns.length}:`;
  at("action").textContent = turn.action || "(nothing)";
  const facts = [turn.changes ? "changes the screen" : "changes nothing", `${(100 * turn.off).toFixed(2)} % of the dreamed pixels are visibly off`];
  facts.push(`PSNR ${turn.psnr} dB`);
  if (turn.iou !== null) facts.push(`IoU of the change, one turn ahead: ${turn.iou}`);
  if (turn.reward) facts.push(`real reward ${turn.reward}`);
  if (turn.terminated) facts.push("the end");
  at("facts").textContent = facts.join(" · ");
  const old = image(before(number), "Real screen before the action");
  at("before").replaceChildren(old, ...(turn.place ? [outline(turn.place)] : []));
  at("real").replaceChildren(image(turn.real, "Real screen after the action"));
  at("dream").replaceChildren(image(turn.dream, "Dreamed screen after the action"));
  at("ahead").replaceChildren(image(turn.ahead, "Screen dreamed from the real one before"));
  at("difference").replaceChildren(image(turn.shrunk, "Difference of dream and reality"), image(turn.dream, ""));
  [...at("strip").querySelectorAll("button")].forEach((b, k) => b.setAttribute("aria-current", String(k === number)));
}

function go(to) {
  number = Math.max(0, Math.min(chosen.turns.length - 1, to));
  drawTurn();
}

function open(episode) {
  chosen = episode;
  at("name").textContent = episode.id;
  at("goal").textContent = episode.goal;
  slider.max = episode.turns.length - 1;
  at("parting").disabled = episode.parted === null;
  at("strip").replaceChildren(...episode.turns.map((turn, k) => {
    const item = make("li"), button = make("button", turn.parted ? "parted" : "");
    button.type = "button";
    button.title = `Turn ${k + 1}: ${turn.action}`;
    button.append(image(turn.dream, `Dream of turn ${k + 1}`));
    button.addEventListener("click", () => go(k));
    item.append(button);
    return item;
  }));
  go(0);
  drawList();
}

function drawList() {
  at("episodes").replaceChildren(...shown.map((episode) => {
    const item = make("li"), button = make("button", episode.parted === null ? "" : "parted", episode.id);
    button.type = "button";
    button.setAttribute("aria-current", String(episode === chosen));
    const where = episode.parted === null ? "never parts" : `parts at turn ${episode.parted + 1}`;
    button.append(make("small", "", `${where} of ${episode.turns.length}`));
    button.addEventListener("click", () => open(episode));
    item.append(button);
    return item;
  }));
}

which.addEventListener("change", () => {
  shown = data.episodes.filter((e) => !which.value || (e.parted !== null) === (which.value === "parted"));
  drawList();
  if (shown.length && !shown.includes(chosen)) open(shown[0]);
});
slider.addEventListener("input", () => go(Number(slider.value)));
at("previous").addEventListener("click", () => go(number - 1));
at("next").addEventListener("click", () => go(number + 1));
at("parting").addEventListener("click", () => go(chosen.parted));
if (data.episodes.length) open(data.episodes[0]);
