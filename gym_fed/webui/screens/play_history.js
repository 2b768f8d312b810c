// The saved conversations: a list to open, rename and delete them.
import {action, ago, api, count, el, message, post, replace, say} from "../static/app.js";

// historyPanel({open(id, chat), deleted(id), current()}) -> {node, load(), keep(chat)}
export function historyPanel({open, deleted, current}) {
  const list = el("ul", {class: "chats"}), note = el("p", {class: "small quiet", role: "status"});
  const find = el("input", {id: "find-chat", type: "search", placeholder: "Find a conversation", "aria-label": "Find a conversation", oninput: () => draw()});
  const node = el("details", {class: "history", open: matchMedia("(min-width: 961px)").matches}, el("summary", {}, "Conversations"), find, list, note);
  let chats = [], rest = "";

  async function load() {
    const found = await api("play/chats");
    chats = found.chats;
    rest = [found.total > chats.length + found.unreadable && `The newest ${chats.length} of ${count(found.total, "conversation")}.`, found.unreadable > 0 && `${count(found.unreadable, "file")} cannot be read.`].filter(Boolean).join(" ");
    draw();
  }

  function draw() {
    const words = find.value.trim().toLowerCase(), shown = chats.filter((one) => one.title.toLowerCase().includes(words));
    find.hidden = chats.length < 8;
    replace(list, shown.map((one) => el("li", {"aria-current": one.id === current() ? "true" : null},
      el("button", {type: "button", class: "plain title", title: `${one.title}, ${ago(one.at)}`, onclick: () => show(one.id)}, one.title || "…"),
      el("button", {type: "button", class: "plain small", "aria-label": `Rename ${one.title}`, onclick: () => rename(one)}, "Rename"),
      action("Delete", () => remove(one), {confirm: `Delete the conversation “${one.title}”?`}))));
    for (const button of list.querySelectorAll(".action button")) { button.className = "plain small"; button.setAttribute("aria-label", `Delete ${button.closest("li").querySelector(".title").textContent}`); }
    replace(note, chats.length ? rest : "None yet.");
  }

  async function show(id) { try { open(id, await api(`play/chats/${id}`)); draw(); } catch (error) { say(message(error)); } }

  async function rename(one) {
    const title = window.prompt("Title of the conversation", one.title)?.trim();
    if (!title) return;
    try { await post(`play/chats/${one.id}`, {...await api(`play/chats/${one.id}`), title: title.slice(0, 80)}, "PUT"); await load(); } catch (error) { say(message(error)); }
  }

  async function remove(one) {
    await post(`play/chats/${one.id}`, {}, "DELETE");
    deleted(one.id);
    await load();
  }

  // Save a new or changed conversation, and return its id.
  async function keep(id, chat) {
    const {id: kept} = await post(id ? `play/chats/${id}` : "play/chats", chat, id ? "PUT" : "POST");
    await load();
    return kept;
  }

  return {node, load, draw, keep};
}
