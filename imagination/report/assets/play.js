const $ = (id) => document.getElementById(id);
let socket = null;
let waiting = null; // what is done with the socket's next message
let start = "", seen = "";
let playing = false;

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function say(text) { $("status").textContent = text; }

function enable(on) {
  playing = on;
  for (const part of $("act").elements) part.disabled = !on;
  if (on) $("action").focus();
}

function connected() {
  return new Promise((done, failed) => {
    if (socket && socket.readyState === WebSocket.OPEN) { done(); return; }
    const address = new URL("ws", location.href);
    address.protocol = address.protocol === "https:" ? "wss:" : "ws:";
    const opened = new WebSocket(address);
    socket = opened;
    opened.onopen = () => done();
    opened.onmessage = (event) => {
      const message = JSON.parse(event.data);
      if (waiting) { const next = waiting; waiting = null; next.done(message); return; }
      if (message.type === "error") { say(message.data.message); enable(false); }
    };
    opened.onclose = () => {
      if (socket === opened) socket = null;
      const error = new Error("The server has closed the session. Begin again.");
      if (waiting) { const next = waiting; waiting = null; next.failed(error); }
      else if (playing) { say(error.message); enable(false); }
      failed(new Error("The server does not answer."));
    };
  });
}

async function ask(type, data) {
  await connected();
  const answered = new Promise((done, failed) => { waiting = { done, failed }; });
  socket.send(JSON.stringify({ type, data }));
  const message = await answered;
  if (message.type === "error") throw new Error(message.data.message);
  return message.data;
}

function percent(value) { return `${(100 * value).toFixed(1)} %`; }

function facts(answer) {
  const about = answer.observation.metadata;
  const parts = [`reward ${answer.reward === null ? "none" : answer.reward}`];
  if (about.confidence !== undefined) parts.push(`confidence ${percent(about.confidence)}`);
  if (about.outcome_confidence !== undefined) parts.push(`of reward and end ${percent(about.outcome_confidence)}`);
  if (about.probability !== undefined) parts.push(`right with ${percent(about.probability)}`);
  if (about.disagreement !== undefined) parts.push(`disagreement ${about.disagreement.toFixed(2)} nats`);
  return parts.join(", ");
}

function ended(about) {
  if (about.terminated) return "The dreamed world has ended.";
  if (about.truncated) return `The dream was cut: ${about.stop}.`;
  return "";
}

function show(action, answer) {
  const turn = element("li", "turn");
  const line = element("div", "act");
  const about = answer.observation.metadata;
  line.append(element("span", "no", String(about.turn)), element("code", "", action), element("span", "conf", facts(answer)));
  turn.append(line, element("p", "text", answer.observation.text));
  if (about.trusted === false) turn.append(element("p", "doubt", "The guard does not trust this turn; it pays nothing."));
  if (answer.done) turn.append(element("p", "note end", ended(about)));
  $("turns").append(turn);
  turn.scrollIntoView({ block: "nearest" });
  return turn;
}

// The box is there at once, so that nothing moves under the reader's pointer when it is filled.
async function nearest(turn, action, before) {
  const box = element("details", "near");
  const list = element("ol", "");
  box.append(element("summary", "", "logged transitions like this one"), list);
  turn.append(box);
  const reply = await fetch("nearest", { method: "POST", body: JSON.stringify({ start, seen: before, action }) });
  if (!reply.ok) return;
  const { transitions } = await reply.json();
  if (!transitions.length) list.replaceWith(element("p", "note", "None is."));
  for (const near of transitions) {
    const item = element("li", "");
    item.append(element("code", "", near.action), element("p", "text", near.observation),
      element("p", "note", `reward ${near.reward}${near.terminated ? ", the world ended" : ""}; seen before it:`),
      element("p", "text", near.seen));
    list.append(item);
  }
}

$("begin").addEventListener("submit", async (event) => {
  event.preventDefault();
  try {
    const answer = await ask("reset", { task: $("task").value, seed: Number($("seed").value) });
    start = seen = answer.observation.text;
    $("opening").textContent = start;
    $("turns").replaceChildren();
    $("episode").hidden = false;
    say("");
    enable(true);
  } catch (error) { say(error.message); }
});

$("act").addEventListener("submit", async (event) => {
  event.preventDefault();
  const action = $("action").value;
  if (!playing || !action.trim()) return;
  enable(false);
  say("Dreaming…");
  try {
    const before = seen;
    const answer = await ask("step", { message: action });
    seen = answer.observation.text;
    $("action").value = "";
    say(answer.done ? "The episode is over. Begin again." : "");
    enable(!answer.done);
    await nearest(show(action, answer), action, before);
  } catch (error) { say(`${error.message} Begin again.`); }
});

// a page that is left may be kept for going back to it, and would keep its session
addEventListener("pagehide", () => { if (socket) socket.close(); });

enable(false);
(async () => {
  try {
    const { tasks } = await (await fetch("tasks")).json();
    for (const task of tasks) { const option = element("option", "", task); option.value = task; $("task").append(option); }
    say("");
  } catch (error) { say("The server does not answer."); }
})();
