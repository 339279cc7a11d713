// One pair, side by side. All text of games and models becomes text nodes here, and nothing else.
const view = document.getElementById("pair");

function hitsIn(text) {
  const low = text.toLowerCase(), found = [];
  if (low.length !== text.length) return found; // letters that change their length: the places would be wrong
  for (const term of terms) {
    for (let at = low.indexOf(term); at >= 0; at = low.indexOf(term, at + term.length)) found.push([at, at + term.length]);
  }
  return found;
}

function write(element, text, marks) {
  const hits = hitsIn(text), cuts = new Set([0, text.length]);
  for (const [start, end] of [...marks, ...hits]) cuts.add(start).add(end);
  const points = [...cuts].sort((a, b) => a - b);
  const within = (spans, at) => spans.some(([start, end]) => start <= at && at < end);
  for (let i = 0; i + 1 < points.length; i++) {
    let node = document.createTextNode(text.slice(points[i], points[i + 1]));
    for (const [spans, tag, name] of [[hits, "span", "hit"], [marks, "mark", ""]]) {
      if (!within(spans, points[i])) continue;
      const around = make(tag, name);
      around.append(node);
      node = around;
    }
    element.append(node);
  }
  return element;
}

function answer(side, name, title, marked) {
  const cell = make("div", "text in-" + name);
  cell.append(make("span", "who " + name, title));
  if (!side) {
    cell.append(make("span", "cut", "no answer"));
    return cell;
  }
  const [text, reward, terminated, , marks, seen] = side;
  if (seen) cell.append(picture(seen, "after the action"));
  write(cell, texts[text], marked && marks ? marks : []);
  tags(cell, reward, terminated);
  return cell;
}

function picture(place, what) {
  const image = make("img", "screen");
  image.src = pictures[place - 1];
  image.alt = `Screenshot of the real page ${what}`;
  return image;
}

function tags(cell, reward, terminated) {
  if (!reward && !terminated) return;
  const line = make("div", "tags");
  if (reward) line.append(make("span", "tag", "reward " + Number(reward.toPrecision(4))));
  if (terminated) line.append(make("span", "tag", "the end"));
  cell.append(line);
}

function turnView(pair, turn, k) {
  const [action, kind, unsure, dream, real] = turn, item = make("li", "turn");
  const parted = pair.first !== null && k > pair.first;
  if (k === pair.first) {
    item.id = "first";
    item.tabIndex = -1;
    item.append(make("div", "parting", `Turn ${k + 1}: here they part, ${words(kind)}`));
  }
  if (parted) item.classList.add("after");
  const act = make("div", "act");
  act.append(make("span", "no", String(k + 1)), write(make("code"), "> " + texts[action], []));
  act.append(make("span", "kind k-" + kind, words(kind)));
  if (unsure) act.append(make("span", "tag", "the guard ended the dream here"));
  if (dream && dream[3] !== null) act.append(make("span", "conf", `confidence ${Math.round(100 * dream[3])} %`));
  if (dream && dream[6] !== null) {
    const tag = make("span", "tag", "answered by a rule of the log");
    tag.title = texts[dream[6]];
    act.append(tag);
  }
  item.append(act);
  if (kind === "same" && !real[5]) {
    const both = write(make("div", "both text"), texts[dream[0]], []);
    tags(both, real[1], real[2]);
    item.append(both);
  } else {
    const cells = make("div", "cells");
    cells.append(answer(dream, "dream", "Dream", true), answer(real, "real", "Reality", true));
    item.append(cells);
  }
  return item;
}

function ending(side) {
  const reward = side.reward === null ? "" : `, reward ${Number(side.reward.toPrecision(4))}`;
  const stop = side.stop === side.outcome ? "" : ` (${side.stop.replaceAll("_", " ")})`;
  return `${side.outcome} after ${side.turns} turn${side.turns === 1 ? "" : "s"}${stop}${reward}`;
}

function drawPair() {
  view.replaceChildren();
  if (!chosen) {
    view.append(make("p", "empty", shown.length ? "Choose a pair." : "No pair matches. Clear a filter or the search."));
    return;
  }
  const pair = chosen, head = make("header");
  const title = make("h2"), link = make("a", "permalink", pair.id);
  link.href = address(pair);
  link.title = "A link to this pair";
  title.append(link);
  const facts = [words(pair.source), pair.split, pair.task_id, pair.agent, `seed ${pair.seed}`];
  head.append(title, make("p", "note", facts.join(" · ")));
  if (!pair.comparable) head.append(make("p", "note", "Not comparable: a world broke, or they began differently."));
  const buttons = make("div", "buttons");
  for (const [label, act, disabled] of [
    ["Previous", () => step(-1), shown.indexOf(pair) <= 0],
    ["Next", () => step(1), shown.indexOf(pair) >= shown.length - 1],
    ["First difference", jump, pair.first === null],
  ]) {
    const button = make("button", "", label);
    button.type = "button";
    button.disabled = disabled;
    button.addEventListener("click", act);
    buttons.append(button);
  }
  head.append(buttons);
  const heads = make("div", "heads");
  heads.append(make("span", "dream", "Dream · " + ending(pair.dream)), make("span", "real", "Reality · " + ending(pair.real)));
  const start = make("details", "start");
  start.open = true;
  start.append(make("summary", "", "Where both start"));
  const text = write(make("div", "text"), texts[pair.start], []);
  if (pair.screenshot) text.prepend(picture(pair.screenshot, "at the start"));
  start.append(text);
  const turns = make("ol", "turns");
  turns.append(...pair.turns.map((turn, k) => turnView(pair, turn, k)));
  view.append(head, heads, start, turns);
  for (const [side, name] of [[pair.dream, "Dream"], [pair.real, "Reality"]]) {
    if (side.failure) view.append(make("p", "failure text", `${name}: ${side.failure}`));
  }
}

function jump() {
  const first = document.getElementById("first");
  if (!first) return;
  first.scrollIntoView({ block: "center" });
  first.focus({ preventScroll: true });
}
