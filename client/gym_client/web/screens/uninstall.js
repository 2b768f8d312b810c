// Removes what the client has written on this machine, after every hub was left and the user has confirmed.
import {action, api, copyable, count, el, facts, mayChange, post, replace} from "../static/app.js";

export const title = "Uninstall";

export async function show(root) {
  const found = await api("uninstall"), abandon = el("input", {type: "checkbox", id: "abandon"});
  replace(root, el("header", {}, el("h1", {}, "Uninstall")),
    el("p", {}, "Deletes what gym-client wrote on this machine. This includes your private key: it cannot be recreated, and credits that were not transferred are lost with it. Hubs keep what they have merged."),
    facts([["Folder", found.folder], ["Deleted", found.files.join(", ") || "nothing"], found.others.length && ["Kept for other programs", found.others.join(", ")]]),
    found.hubs.length > 0 && el("div", {class: "panel"}, el("p", {}, `You still contribute to ${found.hubs.join(", ")}. `, el("a", {href: "/join"}, "Leave first"), "."), el("label", {class: "choice", for: "abandon"}, abandon, " A hub no longer exists: delete its account from this machine anyway")),
    mayChange() && action("Delete", async () => {
      const {deleted} = await post("uninstall", {abandon: abandon.checked});
      replace(root, el("header", {}, el("h1", {}, "Deleted")), el("p", {role: "status"}, `${count(deleted, "entry", "entries")} deleted; this page has ended. To remove the program too:`), copyable("pip uninstall gym-fed"));
    }, {confirm: `Delete ${count(found.files.length, "entry", "entries")} in ${found.folder}, including your private key?`}));
}
