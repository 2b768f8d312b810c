// Chat with models on this machine: stream one or two answers, show token probabilities, save chats, and teach answers.
import {action, api, bytes, copyButton, count, duration, el, empty, failed, leave, loading, mayChange, message, number, on, post, remember, replace, say, state, streamed} from "../static/app.js";
import {historyPanel} from "./play_history.js";

export const title = "Play";

// Kept while other screens are shown. `chat.id` is the id of the saved conversation.
const memory = {chosen: ["", ""], compares: false, turns: [], system: "", temperature: 0.7, top_p: 1, max_tokens: 256, seed: "", logprobs: false, chat: {id: ""}, temporary: false, plain: false};
const KINDS = {package: "Comes with gym-fed", run: "Runs", folder: "Folders", adapter: "Adapters", gguf: "GGUF files", cache: "Hugging Face cache"};
const SIDES = ["A", "B"];
const MOST_ATTEMPTS = 100;
const KEPT = ["base", "variant", "label", "text", "error", "finish", "count", "first", "took"];

// The newest save. Each waits for the previous one, since the second save of a new conversation needs its id.
let saved = Promise.resolve();

// How a streaming answer is shown: as text, or token by token on request.
const answerText = (text) => { const root = el("div", {class: "said"}, text); return {root, add: (more) => root.append(more)}; };
let tokenView = null;

export async function show(root, parameters, query) {
  let options = new Map(), servers = [], running = null, tick = null;
  const first = await api("play");
  readOptions(first);
  servers = first.servers;
  const taughtTo = new Set(first.taught);
  memory.chosen = SIDES.map((side, at) => {
    const wanted = query.get(side.toLowerCase()) || memory.chosen[at];
    return options.has(wanted) ? wanted : "";
  });
  if (!memory.chosen[0] && servers.length && options.has(servers[0].base)) memory.chosen[0] = servers[0].base;
  memory.compares = Boolean(memory.chosen[1]) && (memory.compares || query.has("b"));

  const sides = el("div", {class: "sides"}), talk = el("div", {class: "talk"}), status = el("p", {class: "visually-hidden", role: "status"});
  const prompt = el("textarea", {id: "prompt", rows: 3, placeholder: "Write a message", onkeydown: (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); ask(); }
  }, oninput: drawButtons});
  const send = el("button", {class: "primary", type: "submit"}, "Send"), stop = el("button", {type: "button", onclick: () => running?.abort()}, "Stop");
  const problem = el("p", {class: "problem", role: "alert"}), hint = el("span", {class: "quiet small"});
  const compose = el("form", {class: "compose", onsubmit: (event) => { event.preventDefault(); ask(); }},
    el("label", {for: "prompt"}, "Message"), prompt, el("div", {class: "spread"}, hint, el("span", {class: "row"}, stop, send)), problem);
  const history = historyPanel({open: (id, chat) => open(id, chat), deleted: (id) => { if (memory.chat.id === id) memory.chat = {id: ""}; }, current: () => memory.chat.id});
  const system = el("textarea", {id: "set-system", rows: 3, value: memory.system, oninput: (event) => { memory.system = event.target.value; }});
  const taught = el("div");
  let teaching = null;
  replace(root,
    el("header", {}, el("h1", {}, "Play"), el("button", {type: "button", onclick: () => open("", null)}, "New conversation")),
    el("div", {class: "play"}, el("div", {class: "conversation"}, sides, talk, mayChange() ? compose : el("p", {class: "quiet"}, "Viewers cannot send prompts.")), settings()),
    status, taught);

  on("serving", (news) => { servers = news; drawSides(); drawButtons(); });
  on("resumed", async () => { ({servers} = await api("play")); drawSides(); drawButtons(); });
  leave(() => { running?.abort(); clearInterval(tick); });
  tick = setInterval(() => { if (servers.some((one) => one.status === "loading")) { for (const one of servers) if (one.status === "loading") one.seconds += 1; drawStatus(); } }, 1000);
  drawSides();
  drawTurns();
  drawButtons();
  drawTaught();
  if (mayChange()) history.load().catch((error) => replace(problem, message(error)));
  if (memory.chosen[0] && mayChange()) await serve();
  prompt.focus({preventScroll: true});

  // ---- models ----

  function readOptions({models, variants}) {
    options = new Map();
    for (const model of models) options.set(model.id, {label: model.id, base: model.id, variant: null, group: KINDS[model.kind] || model.kind, note: bytes(model.bytes)});
    for (const variant of variants) {
      for (const model of models.filter((one) => one.name === variant.base_model)) {
        options.set(`${model.id}:${variant.name}`, {label: `${model.id}:${variant.name}`, base: model.id, variant: variant.name, group: "Variants", note: bytes(variant.size_bytes)});
      }
    }
  }

  function bases() { return [...new Set(picked().map((one) => one.base))]; }
  function picked() { return memory.chosen.slice(0, memory.compares ? 2 : 1).map((label) => options.get(label)).filter(Boolean); }
  function serverOf(option) { return option && servers.find((one) => one.base === option.base); }
  function isReady() { return picked().length === (memory.compares ? 2 : 1) && picked().every((one) => serverOf(one)?.status === "ready"); }

  async function serve() {
    try { servers = (await post("play/serve", {bases: bases()})).servers; replace(problem); } catch (error) { replace(problem, message(error)); }
    drawSides();
    drawButtons();
  }

  async function choose() {
    remember({a: memory.chosen[0], b: memory.compares ? memory.chosen[1] : ""});
    drawSides();
    drawTaught();
    await serve();
  }

  function select(at) {
    const groups = new Map();
    for (const option of options.values()) groups.set(option.group, [...(groups.get(option.group) || []), option]);
    const node = el("select", {id: `model-${at}`, onchange: () => { memory.chosen[at] = node.value; choose(); }},
      el("option", {value: ""}, "Choose a model"),
      [...groups].map(([group, members]) => el("optgroup", {label: group}, members.map((option) => el("option", {value: option.label}, `${option.label} · ${option.note}`)))));
    node.value = options.has(memory.chosen[at]) ? memory.chosen[at] : "";
    return node;
  }

  function drawSides() {
    const focused = document.activeElement?.id;
    const shown = memory.compares ? [0, 1] : [0];
    replace(sides, shown.map((at) => el("div", {class: "side"},
      el("label", {for: `model-${at}`}, memory.compares ? `Model ${SIDES[at]}` : "Model"), select(at), el("div", {class: "serving", "data-at": at}))),
    el("button", {type: "button", class: "compares", "aria-pressed": String(memory.compares), onclick: () => {
      memory.compares = !memory.compares;
      if (!memory.compares || memory.chosen[1]) choose(); else { drawSides(); drawButtons(); document.getElementById("model-1").focus(); }
    }}, memory.compares ? "Stop comparing" : "Compare with another"));
    drawStatus();
    if (focused?.startsWith("model-")) document.getElementById(focused)?.focus();
  }

  function drawStatus() {
    for (const place of sides.querySelectorAll(".serving")) {
      const option = options.get(memory.chosen[Number(place.dataset.at)]), server = serverOf(option);
      if (!option) replace(place, el("span", {class: "quiet small"}, "It is loaded when you choose it."));
      else if (!server) replace(place, state("hollow", "not loaded"));
      else if (server.status === "loading") replace(place, state("half", `loading, ${Math.round(server.seconds)} s`));
      else if (server.status === "ready") replace(place, el("span", {class: "row"}, state("filled", `ready, loaded in ${number(server.seconds, 2)} s`), mayChange() && el("button", {type: "button", class: "plain", "aria-label": `Unload ${option.label}`, onclick: () => { memory.chosen[Number(place.dataset.at)] = ""; choose(); }}, "Unload")));
      else if (!place.querySelector("details")) {
        replace(place, state("struck", "failed to load"), el("details", {open: true}, el("summary", {}, "What it printed"), el("pre", {class: "output"}, server.output.join("\n") || "Nothing.")), action("Load again", serve));
      }
    }
  }

  // ---- settings ----

  function settings() {
    const field = (name, label, input, help = "") => el("div", {class: "field"}, el("label", {for: `set-${name}`}, label), input, help && el("span", {class: "help"}, help));
    const figure = (name, label, more, help) => field(name, label, el("input", {id: `set-${name}`, type: "number", value: memory[name], ...more, oninput: (event) => { memory[name] = event.target.value; }}), help);
    return el("aside", {class: "set", "aria-label": "Conversations and settings"},
      mayChange() && history.node,
      field("system", "System prompt", system),
      el("div", {class: "pairs"},
        figure("temperature", "Temperature", {min: 0, max: 2, step: 0.1}, "0 = greedy"),
        figure("top_p", "Top p", {min: 0.05, max: 1, step: 0.05}),
        figure("max_tokens", "Max tokens", {min: 1, max: 32768, step: 1}),
        figure("seed", "Seed", {min: 0, step: 1, placeholder: "random"}, "the same answer again")),
      el("label", {class: "tick"}, el("input", {type: "checkbox", checked: memory.logprobs, onchange: async ({target}) => { if (target.checked) tokenView ||= (await import("./play_tokens.js")).tokenView; memory.logprobs = target.checked; }}), " Show each token’s probability"),
      el("label", {class: "tick"}, el("input", {type: "checkbox", checked: !memory.plain, onchange: (event) => { memory.plain = !event.target.checked; drawTurns(); }}), " Format Markdown"),
      mayChange() && el("label", {class: "tick"}, el("input", {type: "checkbox", checked: memory.temporary, onchange: (event) => { memory.temporary = event.target.checked; }}), " Do not keep conversations"));
  }

  function asked(option, messages) {
    const seed = String(memory.seed).trim();
    return {base: option.base, variant: option.variant, messages, temperature: Number(memory.temperature), top_p: Number(memory.top_p), max_tokens: Number(memory.max_tokens), seed: seed === "" ? null : Number(seed), logprobs: memory.logprobs};
  }

  // ---- the conversation ----

  // Show a saved conversation, or a new one.
  function open(id, chat) {
    if (running) { running.abort(); running = null; }
    memory.chat = {id};
    memory.turns = (chat?.turns || []).map(({prompt: asked, attempts, shown}) => ({prompt: asked, attempts: attempts.map((answers) => answers.map((answer) => ({...answer, logprobs: false, tokens: []}))), shown: Math.min(shown, attempts.length - 1)}));
    for (const turn of memory.turns) turn.answers = turn.attempts[turn.shown];
    if (chat) memory.system = system.value = chat.system;
    for (const [index, turn] of memory.turns.entries()) for (const answers of turn.attempts) answers.forEach((answer, at) => { answer.heard = heard(at, index).concat({role: "user", content: turn.prompt}); });
    drawTurns();
    drawButtons();
    history.draw();
    prompt.focus();
  }

  // Save the conversation after every answer, unless the user has turned this off.
  function keep() {
    if (memory.temporary || !memory.turns.length) return;
    const {chat, turns} = memory, said = {system: memory.system, turns: turns.map(({prompt: asked, attempts, shown}) => ({prompt: asked, shown, attempts: attempts.map((answers) => answers.map((answer) => Object.fromEntries(KEPT.map((key) => [key, answer[key]]))))}))};
    saved = saved.then(async () => {
      chat.id = await history.keep(chat.id, said);
      history.draw();
    }).catch((error) => replace(problem, `The conversation was not saved: ${message(error)}`));
  }

  // Edit a prompt: the saved conversation keeps what followed it, and a new conversation continues from here.
  function edit(turn) {
    const at = memory.turns.indexOf(turn);
    if (running || (!memory.chat.id && at < memory.turns.length - 1 && !window.confirm("This conversation is not saved. Replace everything after this prompt?"))) return;
    memory.turns = memory.turns.slice(0, at);
    memory.chat = {id: ""};
    prompt.value = turn.prompt;
    drawTurns();
    drawButtons();
    history.draw();
    prompt.focus();
  }

  // The messages for one side: turns before the comparison have one answer, which both sides continue.
  function heard(at, upTo) {
    const system = memory.system.trim() ? [{role: "system", content: memory.system}] : [];
    return [...system, ...memory.turns.slice(0, upTo).flatMap((turn) => {
      const answer = turn.answers[at] || turn.answers[0];
      return answer.text ? [{role: "user", content: turn.prompt}, {role: "assistant", content: answer.text}] : []; // skip a question without an answer
    })];
  }

  function ask() {
    const text = prompt.value.trim();
    if (running || !text || !isReady()) return;
    memory.turns.push({prompt: text, attempts: [], shown: 0, answers: []});
    prompt.value = "";
    answerLast();
  }

  // Answer the last prompt with the chosen models; earlier answers are kept and can be shown.
  async function answerLast() {
    const turn = memory.turns.at(-1);
    if (running || !isReady()) return;
    turn.answers = picked().map((option) => ({base: option.base, variant: option.variant, label: option.label, logprobs: memory.logprobs, text: "", tokens: [], error: "", finish: "", first: 0, took: 0, count: 0}));
    turn.answers.forEach((answer, at) => { answer.heard = heard(at, memory.turns.length - 1).concat({role: "user", content: turn.prompt}); });
    turn.attempts = [...turn.attempts, turn.answers].slice(-MOST_ATTEMPTS);
    turn.shown = turn.attempts.length - 1;
    running = new AbortController();
    replace(problem);
    drawTurns();
    drawButtons();
    status.textContent = "Answering";
    talk.lastElementChild.scrollIntoView({block: "end"});
    const mine = running;
    await Promise.all(turn.answers.map((answer) => stream(answer, mine.signal)));
    if (running !== mine) return; // a different conversation is shown
    running = null;
    const isAtEnd = endIsSeen();
    status.textContent = turn.answers.map((answer, at) => `${turn.answers.length > 1 ? `${SIDES[at]}: ` : ""}${answer.error || answer.text}`).join("\n");
    drawTurns();
    drawButtons();
    keep();
    if (isAtEnd) talk.lastElementChild.scrollIntoView({block: "end"});
  }

  // A reader at the end of an answer stays there while it grows; who scrolls up is left alone.
  const endIsSeen = () => talk.lastElementChild.getBoundingClientRect().bottom <= compose.getBoundingClientRect().top + 60;

  function showAttempt(turn, at) {
    turn.shown = at;
    turn.answers = turn.attempts[at];
    drawTurns();
    keep();
  }

  async function stream(answer, signal) {
    const began = performance.now();
    try {
      await streamed("play/chat", asked(answer, answer.heard), signal, (data) => take(answer, data, began));
      if (!answer.finish && !answer.error) answer.error = "The answer was interrupted.";
    } catch (error) {
      if (error.name === "AbortError") answer.finish = "stopped";
      else answer.error = message(error);
    }
    answer.took = performance.now() - began;
  }

  function take(answer, data, began) {
    if (data.error) { answer.error = data.error.message; return; }
    if (data.usage) answer.count = data.usage.completion_tokens;
    for (const choice of data.choices) {
      const tokens = choice.logprobs?.content || [];
      if (choice.delta.content || tokens.length) {
        answer.first ||= performance.now() - began;
        answer.text += choice.delta.content || "";
        answer.tokens.push(...tokens);
        const isAtEnd = endIsSeen();
        answer.node?.add(choice.delta.content || "", tokens);
        if (isAtEnd) talk.lastElementChild.scrollIntoView({block: "end"});
      }
      if (choice.finish_reason) answer.finish = choice.finish_reason;
    }
  }

  function drawTurns() {
    if (!memory.turns.length) { replace(talk, empty(options.size > 1 ? "Ask something. Conversations are stored only on this machine." : "gym-nano comes with gym-fed; models that you train are listed next to it.", !memory.chosen[0] && options.has("gym-nano") && el("button", {type: "button", onclick: () => { memory.chosen[0] = "gym-nano"; choose(); }}, "Load gym-nano"))); return; }
    replace(talk, memory.turns.map((turn) => el("article", {class: "exchange"},
      el("div", {class: "asked"}, el("h2", {class: "who"}, "You"), el("p", {class: "said"}, turn.prompt),
        !running && mayChange() && el("div", {class: "row small"}, el("button", {type: "button", class: "plain", onclick: () => edit(turn)}, "Edit"), turn === memory.turns.at(-1) && el("button", {type: "button", class: "plain", disabled: !isReady(), onclick: answerLast}, "Ask again"), attemptsOf(turn))),
      el("div", {class: turn.answers.length > 1 ? "answers two" : "answers"}, turn.answers.map((answer, at) => drawAnswer(turn, answer, at))),
      !running && turn.answers.length > 1 && preference(turn))));
  }

  function attemptsOf(turn) {
    const total = turn.attempts.length, step = (by, label, sign) => el("button", {type: "button", class: "plain", "aria-label": label, disabled: !turn.attempts[turn.shown + by], onclick: () => showAttempt(turn, turn.shown + by)}, sign);
    return total > 1 && el("span", {class: "row quiet"}, step(-1, "The answer before", "‹"), `${turn.shown + 1} of ${total}`, step(1, "The next answer", "›"));
  }

  function drawAnswer(turn, answer, at) {
    answer.node = answer.logprobs && !answer.error ? tokenView(answer.tokens) : answerText(answer.text);
    const isGoing = running && turn === memory.turns.at(-1), place = el("div");
    if (!isGoing && !answer.logprobs && answer.text && !memory.plain) import("./play_markdown.js").then(({markdown}) => replace(answer.node.root, el("div", {class: "stack"}, markdown(answer.text))));
    const rate = answer.count > 1 && answer.took > answer.first ? (1000 * (answer.count - 1)) / (answer.took - answer.first) : 0;
    const figures = [answer.finish === "length" && "cut at max tokens", answer.finish === "stopped" && answer.text && "stopped", answer.count && count(answer.count, "token"), answer.first && `first after ${answer.first < 1000 ? `${Math.round(answer.first)} ms` : duration(answer.first / 1000)}`, rate && `${number(rate, 3)} tok/s`].filter(Boolean);
    return el("div", {class: "answer"},
      el("h3", {class: "who"}, turn.answers.length > 1 && `${SIDES[at]} · `, answer.label),
      answer.node.root,
      isGoing && !answer.text && loading(),
      answer.error && el("p", {class: "problem", role: "alert"}, answer.error),
      !isGoing && !answer.error && !answer.text && el("p", {class: "quiet"}, answer.finish === "stopped" ? "Stopped before the first word." : "The answer is empty."),
      !isGoing && el("div", {class: "row small quiet"}, el("span", {}, figures.join(" · ")), answer.text && copyButton(answer.text, answer.node.root, {kind: "plain"}), answer.text && mayChange() && el("button", {type: "button", class: "plain", onclick: () => better(place, answer)}, "Teach a better answer")),
      place);
  }

  // ---- teaching ----

  // The taught answers of the chosen models, loaded when the panel is opened or an answer is taught.
  async function drawTaught() {
    const these = bases().filter((base) => taughtTo.has(base));
    if (!these.length) { replace(taught); return; }
    if (teaching) { await fillTaught(); return; }
    const open = el("details", {ontoggle: () => { if (open.open) fillTaught(); }}, el("summary", {}, `Taught to ${these.join(" and ")}`));
    replace(taught, open);
  }

  async function fillTaught() {
    teaching ||= import("./play_taught.js").then(({taughtPanel}) => taughtPanel({bases, refresh: async () => { readOptions(await api("play")); drawSides(); }, compareWith: (base, variant) => {
      memory.chosen = [base, `${base}:${variant}`];
      memory.compares = true;
      choose();
    }}));
    try {
      const panel = await teaching;
      replace(taught, panel.node);
      await panel.draw();
    } catch (error) {
      teaching = null;
      replace(taught, failed(error, fillTaught));
    }
  }

  function preference(turn) {
    const [a, b] = turn.answers;
    if (!mayChange() || !a.text || !b.text || a.text === b.text) return null;
    const prefer = (chosen, rejected) => teach(rejected.base, rejected.heard, chosen.text, rejected.text);
    return el("div", {class: "row"}, el("span", {class: "quiet small"}, "Which is better?"), action("A is better", () => prefer(a, b)), action("B is better", () => prefer(b, a)));
  }

  function better(place, answer) {
    const field = el("textarea", {id: "better", rows: 4, value: answer.text});
    replace(place, el("div", {class: "field better"}, el("label", {for: "better"}, "The answer it should have given"), field,
      el("div", {class: "row"}, action("Save as the better answer", async () => {
        await teach(answer.base, answer.heard, field.value, answer.text);
        replace(place);
      }, {primary: true}), el("button", {type: "button", onclick: () => replace(place)}, "Cancel"))));
    field.focus();
  }

  async function teach(base, messages, chosen, rejected) {
    const {total} = await post("play/taught", {base, prompt: messages, chosen, rejected});
    say(total === 1 ? `The first answer is taught to ${base}` : `${total} answers are taught to ${base}`);
    taughtTo.add(base);
    await fillTaught();
  }

  function drawButtons() {
    stop.hidden = !running;
    send.hidden = Boolean(running);
    send.disabled = !isReady() || !prompt.value.trim();
    hint.textContent = isReady() ? "Enter sends, Shift+Enter starts a new line" : picked().length ? "Wait until the model is ready" : "Choose a model first";
  }
}
