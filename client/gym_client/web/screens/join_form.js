// The form for requesting a hub's terms: an invite or an address, a file of rows, and a name.
import {action, api, count, dropArea, el, leave, message as problem, post, replace, section} from "../static/app.js";

const TYPING_MS = 150; // delay after the last change before the server reads the invite

// joinForm(answer of "join", {invite, isLink, begin(given)}) -> element
export function joinForm({hubs, last, files, link_problem: refused, takes_any_path: anyPath}, {invite, isLink, begin}) {
  const field = (id, label, node, help) => el("div", {class: "field"}, el("label", {for: id}, label), node, help && el("span", {class: "help"}, help));
  const input = (id, label, more, help) => { const node = el("input", {id, ...more}); return {node, part: field(id, label, node, help)}; };
  const read = el("p", {class: "small", role: "status"});
  const message = el("textarea", {id: "invite", rows: 3, autocomplete: "off", spellcheck: "false", value: invite, maxlength: 4096, placeholder: "gym://…", oninput: () => readInvite()});
  const server = input("server", "Hub", {placeholder: "hub.example.org:9443", maxlength: 255, list: "hubs"}, "host or host:port");
  const chosen = el("select", {id: "data"}), place = anyPath && input("path", "or its path on this machine", {placeholder: "/data/my.jsonl", maxlength: 4096, autocomplete: "off"});
  const name = input("name", "Your name there", {value: last.name || "", maxlength: 64, autocomplete: "off"}, "The coordinator sees it. Empty: your id.");
  const columns = input("columns", "Columns, ours=theirs", {placeholder: "prompt=question,completion=answer", maxlength: 1024}, "if the file names them differently");
  const rounds = input("rounds", "Rounds", {type: "number", min: 1, placeholder: "all"}, "stop after N rounds");

  function offer(names, taken) {
    chosen.replaceChildren(el("option", {value: ""}, last.data ? `the last one, ${last.data}` : "a small example that comes with gym-fed"), ...names.map((one) => el("option", {value: one, selected: one === taken}, one.replace(/^data\//, ""))));
  }

  // The server parses the text, as it does when joining: a second parser here could show a different hub.
  let timer = null;
  leave(() => clearTimeout(timer));
  function readInvite() {
    clearTimeout(timer);
    const given = message.value, text = given.trim();
    read.textContent = "";
    if (!text) return;
    timer = setTimeout(async () => {
      let shown, address = null;
      try {
        const found = await post("join/invite", {invite: text});
        address = found.address;
        shown = found.is_cut ? "This invite is incomplete: copy all of it." : address ? `From ${address}. Its key begins with ${found.fingerprint.slice(7, 19)}.` : /\s/.test(text) ? "There is no invite in this text: it begins with gym://." : "This is a code: enter the hub’s address, too.";
      } catch (error) { shown = problem(error); }
      if (message.value !== given) return; // the user has changed the text since
      read.textContent = shown;
      if (!address) other.open = true;
    }, TYPING_MS);
  }

  const other = el("details", {}, el("summary", {}, hubs.length ? "Without an invite: a hub’s address" : "No invite? For an open hub, the address is enough"), server.part);
  const step = (number, text, ...inside) => el("section", {class: "choice-step", "aria-labelledby": `step-${number}`}, el("h3", {id: `step-${number}`}, el("span", {class: "quiet"}, `${number} `), text), inside);
  offer(files, "");
  readInvite();
  const form = el("form", {class: "joining", onsubmit: (event) => event.preventDefault()},
    el("datalist", {id: "hubs"}, hubs.map((hub) => el("option", {value: hub.address}))),
    refused && el("p", {class: "problem", role: "alert"}, refused),
    step(1, "Invite", field("invite", "Paste the message or link that you were sent", message, isLink ? "This invite came from a link. Nothing is sent before you accept the terms." : "It is neither stored nor shown in a command."), read, other, anyPath && byClick()),
    step(2, "Data", dropArea({id: "rows-file", taken: (taken) => { if (!files.includes(taken)) files = [taken, ...files]; offer(files, taken); if (place) place.node.value = ""; }}),
      el("div", {class: "doing-fields"}, field("data", files.length ? `${count(files.length, "file")} here` : "or an existing file", chosen), place && place.part)),
    step(3, "Name", name.part, el("details", {}, el("summary", {}, "More"), el("div", {class: "doing-fields"}, columns.part, rounds.part))),
    action("See the terms", () => begin({server: server.node.value.trim() || null, invite: message.value.trim(), data: place?.node.value.trim() || chosen.value, columns: columns.node.value.trim(), name: name.node.value.trim(), rounds: rounds.node.value ? Number(rounds.node.value) : null}), {primary: true}));
  return hubs.length ? el("details", {open: isLink || Boolean(refused)}, el("summary", {}, "Join another hub, or use other data"), form) : section("Join a hub", form);
}

// Shows whether gym:// links open this page; requested when the section is opened.
function byClick() {
  const box = el("div"), open = el("details", {ontoggle: async () => { if (open.open && !box.firstChild) replace(box, (await import("./join_links.js")).linksPanel(await api("links"))); }}, el("summary", {}, "Open invites with a click"), box);
  return open;
}
